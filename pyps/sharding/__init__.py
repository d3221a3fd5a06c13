"""Memory in proportion to each device: optimizer states and parameters that ranks hold by unlike shares."""
