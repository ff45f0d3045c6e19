"""Encoders, embedding tables and dense retrieval; needs the extra ``agents`` (torch)."""
