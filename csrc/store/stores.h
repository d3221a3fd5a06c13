/* stores.h: a store is made, opened and looked at. */
#ifndef PYPS_STORES_H
#define PYPS_STORES_H

#include "store/pull.h"

/* contents.c */
/* Fills a new segment: the config's parameters, and all of `state` unless it is NULL. */
int contents_write(pyps_store *s, const pyps_config *config, const pyps_state *state,
                   const pyps_tensor *tensors, struct view *view);

#endif
