"""Extensions that read the gradient alone."""
