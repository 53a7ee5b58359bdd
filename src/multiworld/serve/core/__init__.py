"""What both kinds of work share: loss counting, load balancing, SLO attainment."""
