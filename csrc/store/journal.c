/* journal.c: a run's events on file, and deciding them again.
 *
 * Whoever commits an event appends it to one file: what it was, time and measurements included, what came of
 * it, and a digest of the view that followed. Events that changed nothing (somebody waits, goes on, is
 * refused) are noted with the view that they were decided on. Each handle first puts down the present view.
 * In the order of views these are the run's decisions, whoever took them when; a replay begins at the first
 * view on file and takes the very same steps.
 *
 * A process that is killed between its CAS and its line takes that event along: the replay then goes on from
 * the next view on file, and counts what lies between as lost.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "policy/policy.h"
#include "store/segment.h"
#include "store/store.h"

#define MOST_ENTRY (UINT32_C(1) << 30)

/* Followed by [ranks] batches (replan), or by the view itself (EVENT_NONE). */
struct entry {
    uint64_t bytes;    /* with what follows, a multiple of 8 */
    uint64_t sequence; /* of the view that followed, or on which it was decided */
    uint64_t digest;   /* of that view */
    uint64_t verdict;
    struct event event;
    struct outcome outcome;
};

static uint64_t digest(const struct view *v) {
    size_t bytes = view_bytes(v->participants, v->ranks, v->staging_buffers);
    const uint8_t *at = (const uint8_t *)v;
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        uint64_t word;
        memcpy(&word, at + i, 8);
        h = (h ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        h ^= h >> 29;
    }
    return h;
}

static int put(int fd, struct entry *entry, const void *more, size_t bytes) {
    static const uint8_t padding[8];
    size_t odd = -(sizeof *entry + bytes) & 7;
    struct iovec parts[] = {
        {entry, sizeof *entry}, {(void *)(uintptr_t)more, bytes}, {(void *)(uintptr_t)padding, odd}};
    entry->bytes = sizeof *entry + bytes + odd;
    ssize_t rc;
    do rc = writev(fd, parts, 3);
    while (rc < 0 && errno == EINTR);
    return rc == (ssize_t)entry->bytes ? PYPS_OK : fail(PYPS_ESYS, "journal: writing: %s", strerror(errno));
}

/* A full disk ends the journal, not the training: the replay misses what comes after. */
void journal_event(pyps_store *s, const struct event *e, const struct outcome *o, enum verdict verdict,
                   const struct view *v) {
    if (s->journal < 0) return;
    struct entry entry;
    memset(&entry, 0, sizeof entry);
    entry.sequence = v->sequence, entry.verdict = verdict, entry.event = *e, entry.outcome = *o;
    entry.digest = verdict == STEP_COMMIT ? digest(v) : 0;
    size_t bytes = e->kind == EVENT_REPLAN ? v->ranks * sizeof *e->batches : 0;
    if (put(s->journal, &entry, e->batches, bytes)) journal_close(s);
}

void journal_close(pyps_store *s) {
    if (s->journal >= 0) close(s->journal);
    s->journal = -1;
}

static int put_view(pyps_store *s) {
    struct view *v = view_allocate(s);
    bool guest;
    if (!v) return PYPS_ENOSPC;
    int rc = guest_enter(s, &guest);
    if (!rc) rc = view_copy(s, v);
    guest_leave(s, guest);
    struct entry entry;
    memset(&entry, 0, sizeof entry);
    entry.sequence = v->sequence, entry.digest = rc ? 0 : digest(v);
    if (!rc) rc = put(s->journal, &entry, v, view_bytes(v->participants, v->ranks, v->staging_buffers));
    free(v);
    return rc;
}

int pyps_journal(pyps_store *s, const char *path) {
    int rc = store_usable(s, false);
    if (rc) return rc;
    journal_close(s);
    if (!path) return PYPS_OK;
    s->journal = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (s->journal < 0) return fail(PYPS_ESYS, "journal: %s: %s", path, strerror(errno));
    if ((rc = put_view(s))) journal_close(s);
    return rc;
}

/* Replaying. */

struct again {
    struct view *view, *next; /* NULL: none is known */
    size_t capacity;
    pyps_replay_result *out;
};

static bool can_be_view(const struct entry *entry, const struct view *v) {
    size_t bytes = entry->bytes - sizeof *entry;
    if (bytes < sizeof *v || !v->participants || v->participants > MOST_RANKS || !v->ranks ||
        v->ranks > v->participants || !v->staging_buffers || v->staging_buffers > MAX_STAGING_BUFFERS ||
        v->tickets != v->participants * v->staging_buffers)
        return false;
    size_t needed = view_bytes(v->participants, v->ranks, v->staging_buffers);
    return bytes >= needed && bytes < needed + 8 && !policy_check(v->policy, &v->policy_params) &&
           view_valid(v, v);
}

/* As what a handle checks before it asks: that only workers work, and ranks exist. */
static bool can_be_event(const struct entry *entry, const struct view *v) {
    const struct event *e = &entry->event;
    if (e->kind > EVENT_SNAPSHOT_CANCEL || e->slot >= v->participants || e->staging >= v->staging_buffers)
        return false;
    if (e->residual > 2 * v->participants) return false;
    if (e->kind == EVENT_JOIN)
        return e->rank >= -1 && e->rank < (int32_t)v->ranks && (e->role == PYPS_WORKER || e->rank < 0);
    if (e->kind == EVENT_REPLAN) return entry->bytes >= sizeof *entry + v->ranks * sizeof *e->batches;
    bool anybody = e->kind == EVENT_LEAVE || e->kind == EVENT_TICK || e->kind >= EVENT_SNAPSHOT_BEGIN;
    return anybody || view_member(v, e->slot)->rank >= 0 || e->kind == EVENT_PULL;
}

static int begin_at(struct again *a, const struct entry *entry) {
    const struct view *v = (const struct view *)(entry + 1);
    if (!can_be_view(entry, v))
        return fail(PYPS_ECORRUPT, "journal: view %llu is none", (unsigned long long)entry->sequence);
    size_t bytes = view_bytes(v->participants, v->ranks, v->staging_buffers);
    free(a->view), free(a->next);
    a->view = malloc(bytes), a->next = malloc(bytes), a->capacity = bytes;
    if (!a->view || !a->next) return fail(PYPS_ENOSPC, "out of memory for a view of %zu bytes", bytes);
    memcpy(a->view, v, bytes);
    return PYPS_OK;
}

static bool same_outcome(const struct outcome *a, const struct outcome *b) {
    return a->code == b->code && a->ticket == b->ticket && a->round == b->round && a->until == b->until &&
           a->at == b->at && a->staleness == b->staleness &&
           memcmp(&a->scale, &b->scale, sizeof a->scale) == 0 && a->advice == b->advice &&
           a->rank == b->rank && a->snapshot == b->snapshot && a->version == b->version &&
           memcmp(&a->claim, &b->claim, sizeof a->claim) == 0;
}

static void differs(pyps_replay_result *out, const struct entry *entry, const char *what) {
    const struct event *e = &entry->event;
    if (!out->differences++)
        snprintf(out->first, sizeof out->first, "view %llu, event %u of slot %u: %s",
                 (unsigned long long)entry->sequence, (unsigned)e->kind, e->slot, what);
}

static int decide(struct again *a, const struct entry *entry) {
    struct event e = entry->event;
    struct outcome o;
    if (!can_be_event(entry, a->view))
        return fail(PYPS_ECORRUPT, "journal: an event on view %llu is none",
                    (unsigned long long)entry->sequence);
    e.batches = e.kind == EVENT_REPLAN ? (const uint32_t *)(entry + 1) : NULL;
    memcpy(a->next, a->view, a->capacity);
    enum verdict verdict = view_step(a->next, &e, &o);
    a->out->decisions++;
    if (verdict != (enum verdict)entry->verdict) differs(a->out, entry, "another verdict");
    else if (!same_outcome(&o, &entry->outcome)) differs(a->out, entry, "another outcome");
    else if (verdict == STEP_COMMIT && digest(a->next) != entry->digest)
        differs(a->out, entry, "another view");
    if (entry->verdict != STEP_COMMIT) return PYPS_OK;
    struct view *before = a->view;
    a->view = a->next, a->next = before;
    a->out->events++;
    return PYPS_OK;
}

/* One entry, in the order of views. */
static int follow(struct again *a, const struct entry *entry) {
    uint64_t at = a->view ? a->view->sequence : 0;
    bool commits = entry->event.kind && entry->verdict == STEP_COMMIT;
    if (a->view && entry->sequence == at + commits) {
        if (entry->event.kind) return decide(a, entry);
        if (digest(a->view) != entry->digest) differs(a->out, entry, "another view");
        return PYPS_OK;
    }
    if (entry->event.kind) return PYPS_OK; /* before the first view on file, or after a loss */
    if (a->view) a->out->missing_events += entry->sequence - at;
    return begin_at(a, entry);
}

/* By view; what made it goes first. */
static int in_order(const void *left, const void *right) {
    const struct entry *a = *(const struct entry *const *)left, *b = *(const struct entry *const *)right;
    if (a->sequence != b->sequence) return a->sequence < b->sequence ? -1 : 1;
    int first = a->event.kind && a->verdict == STEP_COMMIT,
        second = b->event.kind && b->verdict == STEP_COMMIT;
    if (first != second) return second - first;
    return a < b ? -1 : a > b;
}

static int replay_all(struct entry **entries, size_t count, pyps_replay_result *out) {
    struct again a = {.out = out};
    int rc = PYPS_OK;
    qsort(entries, count, sizeof *entries, in_order);
    for (size_t i = 0; i < count && !rc; i++) rc = follow(&a, entries[i]);
    if (!rc && a.view && entries[count - 1]->sequence > a.view->sequence)
        out->missing_events += entries[count - 1]->sequence - a.view->sequence;
    free(a.view), free(a.next);
    return rc;
}

/* Where the entries lie in a whole file; a last one that is cut short is left out. */
static int entries_of(uint8_t *data, size_t bytes, struct entry ***out, size_t *count) {
    size_t capacity = bytes / sizeof(struct entry) + 1;
    struct entry **entries = malloc(capacity * sizeof *entries);
    if (!entries) return fail(PYPS_ENOSPC, "out of memory for %zu events", capacity);
    *out = entries, *count = 0;
    for (size_t at = 0; at + sizeof(struct entry) <= bytes;) {
        struct entry *entry = (struct entry *)(void *)(data + at);
        if (entry->bytes < sizeof *entry || entry->bytes > MOST_ENTRY || entry->bytes & 7)
            return fail(PYPS_ECORRUPT, "journal: byte %zu: an entry of %llu bytes", at,
                        (unsigned long long)entry->bytes);
        if (entry->bytes > bytes - at) break;
        entries[(*count)++] = entry;
        at += entry->bytes;
    }
    return PYPS_OK;
}

static int read_all(const char *path, uint8_t **data, size_t *bytes) {
    struct stat status;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    *data = NULL, *bytes = 0;
    if (fd < 0 || fstat(fd, &status)) {
        int rc = fail(errno == ENOENT ? PYPS_ENOENT : PYPS_ESYS, "journal: %s: %s", path, strerror(errno));
        if (fd >= 0) close(fd);
        return rc;
    }
    *data = malloc((size_t)status.st_size + 1);
    while (*data && *bytes < (size_t)status.st_size) {
        ssize_t got = read(fd, *data + *bytes, (size_t)status.st_size - *bytes);
        if (got <= 0) break;
        *bytes += (size_t)got;
    }
    close(fd);
    return *data ? PYPS_OK
                 : fail(PYPS_ENOSPC, "out of memory for a journal of %lld bytes", (long long)status.st_size);
}

int pyps_replay(const char *path, pyps_replay_result *out) {
    uint8_t *data;
    size_t bytes, count = 0;
    struct entry **entries = NULL;
    *out = (pyps_replay_result){0};
    int rc = read_all(path, &data, &bytes);
    if (!rc) rc = entries_of(data, bytes, &entries, &count);
    if (!rc && count) rc = replay_all(entries, count, out);
    free(entries), free(data);
    return rc;
}
