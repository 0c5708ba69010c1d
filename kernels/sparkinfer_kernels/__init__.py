"""Operations of the hybrid family: one folder each, a plain torch reference beside every device kernel."""
