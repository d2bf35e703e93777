"""The config: its schema, its checks, and how it is loaded. Imports no torch."""
