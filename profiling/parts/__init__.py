"""The parts of study.py, and what they share."""
