/* config.h: checks of pyps_config that a store and the decision core in virtual time share. */
#ifndef PYPS_POLICY_CONFIG_H
#define PYPS_POLICY_CONFIG_H

#include "pyps.h"

#define CONFIG_MAX_RANKS                                                                                     \
    UINT32_C(1000000) /* of a core in virtual time; a store has fewer: its participants */

/* Copies `config`; fields that a caller of an earlier ABI does not have become zeros. Checks the policy. */
int config_read(const pyps_config *config, pyps_config *copy);
int config_check_batches(const uint32_t *batches, uint32_t count); /* some rank has samples */
int config_check_ranks(const pyps_config *config);                 /* ranks, batches and the round timeout */
uint64_t config_round_timeout(const pyps_config *config);          /* nanoseconds */
/* Each of `ranks` ranks has one turn, and times are possible. */
int config_check_turns(const pyps_turn *turns, uint32_t count, uint32_t ranks, double period_seconds);

#endif
