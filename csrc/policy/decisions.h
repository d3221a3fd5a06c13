/* decisions.h: what an event makes of a view, and the checks of a configuration that a store and a core in virtual time
 * share. */
#ifndef PYPS_DECISIONS_H
#define PYPS_DECISIONS_H

#include "policy/policy.h"

#define CONFIG_MAX_RANKS                                                                                     \
    UINT32_C(1000000) /* of a core in virtual time; a store has fewer: its participants */

/* config.c */
/* Copies `config`; fields that a caller of an earlier ABI does not have become zeros. Checks the policy. */
int config_read(const pyps_config *config, pyps_config *copy);
int config_check_batches(const uint32_t *batches, uint32_t count); /* some rank has samples */
int config_check_ranks(const pyps_config *config);                 /* ranks, batches and the round timeout */
uint64_t config_round_timeout(const pyps_config *config);          /* nanoseconds */
/* Each of `ranks` ranks has one turn, and times are possible. */
int config_check_turns(const pyps_turn *turns, uint32_t count, uint32_t ranks, double period_seconds);

/* view_ranks.c */
void view_init(struct view *view, const struct view_config *config);
void view_enter(struct view *view, struct member *member);            /* after it became active */
void view_ranks_add(struct view *view, uint32_t ranks, uint64_t now); /* the store has `ranks` from now on */
pyps_rank_cost view_cost(const struct rank *rank);
void view_forget_cost(struct rank *rank);
void view_find_all_joined(struct view *view);
enum verdict view_step_replan(struct view *view, const struct event *event, struct outcome *out);
enum verdict view_step_cost_model(struct view *view, const struct event *event);

/* view_round.c */
void view_advance_rounds(struct view *view, uint64_t now); /* closes and opens rounds as the policy says */
/* Assigns the samples of as many later rounds as any worker wants claims ahead: of each round to all ranks at
 * once, so that they add up to the global batch. */
void view_assign_rounds_ahead(struct view *view);
enum verdict view_step_push(struct view *view, const struct event *event, struct outcome *out);
/* Steps that others will take between this member's next pull and its push, where its pull looks so far ahead. */
double view_lookahead(const struct view *view, uint32_t slot);
enum verdict view_step_gate(struct view *view, const struct event *event, struct outcome *out);
enum verdict view_step_check(struct view *view, const struct event *event, struct outcome *out);

/* view_valid.c: false if an index in a view that came from shared memory is out of range */
bool view_valid(const struct view *view, const struct view *expected);

/* view.c: the only way to change a view */
enum verdict view_step(struct view *view, const struct event *event, struct outcome *out);

#endif
