"""What a person reads in a browser: made here, whole, without scripts and without anything from elsewhere."""
