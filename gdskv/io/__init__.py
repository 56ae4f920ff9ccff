"""MOVE: the I/O engines behind one contract (:mod:`gdskv.io.base`). They know bytes and files, not blocks or policy."""
