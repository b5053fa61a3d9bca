"""The launcher starts Ray and its workers, and follows a run to its end."""
