"""What is right: the pure core of a weight update, its protocol and its oracles."""
