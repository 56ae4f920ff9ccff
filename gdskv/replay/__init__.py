"""Replay: recorded or generated traces run against a manager or a store, with every loaded block verified."""
