"""This package beside transformers and beside the machine's own limits, as ratios from interleaved runs."""
