"""A pretraining stack whose optimizer is a distributed Muon with dedicated ownership."""
