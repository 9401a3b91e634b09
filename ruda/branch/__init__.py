"""The branch and its parts as a caller sees them: checked, then the stages in order."""
