"""Adapters that connect an engine with gdskv; each stands on the manager or the store only."""
