"""Where weights come from, and how few bits keep them."""
