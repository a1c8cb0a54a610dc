"""The swap engine: lanes, pools, entries, the timeline, and the pair of hooks that joins them."""
