"""Muon on the matrices a rank owns, AdamW on the rest."""
