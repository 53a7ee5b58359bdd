"""Loss counting, load balancing and SLO attainment, for requests and streams."""
