"""Talking to engines: HTTP legs, their metrics, and the proof of one prefill-decode pair."""
