"""Train PyTorch models on machines that get taken away, and lose nothing.

Importing this package imports no torch: ``keepstep.store`` and the command line stay quick.
"""

__version__ = "0.1.0"
