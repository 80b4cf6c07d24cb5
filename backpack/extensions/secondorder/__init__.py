"""Extensions that propagate curvature back from the loss."""
