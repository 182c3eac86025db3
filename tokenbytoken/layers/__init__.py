"""What a decoder is made of: mixers, feed-forwards, norms, positions, and the states they keep."""
