"""One unit, one schedule: gather, show, free, watch, reduce. Knows neither surface."""
