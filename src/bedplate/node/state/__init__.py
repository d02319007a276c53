"""What a node is and was: generations, layers, the journal of changes, drift."""
