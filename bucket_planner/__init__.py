"""Length distribution and cost curve in, best compiled buckets and engine flags out."""
