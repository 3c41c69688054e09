"""Loading: from verified files into the chunks of a rank, without unpickling."""
