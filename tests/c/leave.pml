/* leave.pml: what becomes of the staging buffer of a worker that leaves, in every interleaving.
 *
 * A worker stages a gradient into the open round, times out, leaves and gives the buffer's pages back; another one takes
 * its slot, and does the same. Two others close rounds and complete them. The first worker or one of the others may be
 * killed between any two of its steps. A step is one access to shared memory; names are those of csrc. Simpler than there:
 *
 *   - The view is a word: what one CAS changes, and what one look at a pinned view finds, is one step.
 *   - The gradient is the number of its ticket, so pages that are gone, or another's, show.
 *   - A round closes at any time: how many gradients it waits for decides no more.
 *   - A worker has one staging buffer. A joiner that finds it needed tries no second time.
 *   - Chunks are words without buffers: chunk.pml has those. clip.pml has a worker that stays.
 */

#ifndef CHUNKS
#define CHUNKS 2
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif

/* -DMUTANT=TWO_LOOKS and so on: a protocol with one fault. */
#define NO_FAULT   0
#define TWO_LOOKS  1 /* a ticket that was admitted after the look that completed all tickets is forgotten */
#define NO_ROUND   2 /* a gradient that waits in the open round is forgotten */
#define NO_HAZARDS 3 /* a participant that still reads the gradient is not looked for */
#ifndef MUTANT
#define MUTANT NO_FAULT
#endif

#define SLOTS        3 /* the workers' is 0 */
#define FIRST        0 /* a worker's name */
#define NEXT         3
#define NONE         7
#define HOLE         8 /* the pages were given back */
#define BEING_STAGED 9

/* The view: its version, and of slot 0 whether a gradient waits in the open round, and the last ticket of one. */
byte admitted;
bool staged;
byte staging_ticket;

byte words[CHUNKS]; /* versions */
byte gradient;      /* of which ticket, or HOLE, or BEING_STAGED */
byte ticket_hazard[SLOTS];
bool has_gradient[ROUNDS + 1]; /* of the ticket's round; a ticket never changes */
bool taken = true;             /* the lock of slot 0, which ends with its process */
byte dead = NONE;              /* the slot of another that is gone */
bool locked;                   /* that slot's byte */

chan kill = [0] of { byte }; /* a process that receives it is dead, and its memory gone, in one step */

inline assert_gradient() { assert(!has_gradient[ticket] || gradient == ticket) }

/* close_round in view_round.c */
inline close_round() {
    admitted++;
    if
    :: staged -> has_gradient[admitted] = true; staging_ticket = admitted; staged = false
    :: else
    fi
}

/* apply in apply.c, of the ticket after the version that chunk_advance has read */
inline apply() {
    ticket_hazard[me] = ticket; /* R1 of atomics.h */
    if
    :: atomic { words[chunk] == ticket - 1 -> assert_gradient() } /* R2 */
       atomic {
           assert_gradient(); /* the step reads the gradient until here */
           if
           :: words[chunk] == ticket - 1 -> words[chunk] = ticket
           :: else
           fi
       }
    :: else
    fi;
    atomic { ticket_hazard[me] = 0; ticket = 0 }
}

/* chunks_follow in apply.c, with chunk_advance; `version` stays: it is the handle's complete_version */
inline chunks_follow() {
    do
    :: atomic { chunk == CHUNKS -> chunk = 0; break }
    :: atomic { chunk < CHUNKS && words[chunk % CHUNKS] >= version -> chunk++ }
    :: atomic { chunk < CHUNKS && words[chunk % CHUNKS] < version -> ticket = words[chunk] + 1 }
       apply()
    od
}

/* chunks_complete, view_pin and staging_is_needed, as they follow in participant.c */
inline look() {
    version = admitted;
    chunks_follow();
    atomic {
        needed = (staged && MUTANT != NO_ROUND) || (staging_ticket > version && MUTANT != TWO_LOOKS);
        last = staging_ticket;
        version = 0
    }
    do /* staging_has_reader in slots.c: W2 of atomics.h */
    :: atomic { slot == SLOTS -> slot = 0; last = 0; break }
    :: atomic {
           slot < SLOTS ->
           needed = needed || (last && ticket_hazard[slot] == last && MUTANT != NO_HAZARDS);
           slot++
       }
    od
}

/* pyps_push in push.c: the gradient goes into the round that is open by then */
inline stage() {
    gradient = BEING_STAGED;
    atomic { gradient = admitted + 1; staged = true }
}

/* leave in participant.c: the round may have waited for this worker alone */
inline leave() {
    if
    :: d_step { staged && admitted < ROUNDS -> close_round() }
    :: true
    fi;
    look(); /* give_back_staging */
    atomic {
        if
        :: !needed -> gradient = HOLE
        :: else
        fi;
        needed = false
    }
}

/* The first one has the slot; the next one takes it over, from one that has left or is dead. */
proctype worker(byte name) {
    byte version, chunk, ticket, slot, last, me; /* its slot is 0 */
    bool needed = false;
    {
        if
        :: name == FIRST
        :: else -> atomic { !taken -> taken = true; ticket_hazard[me] = 0 } look() /* take_over */
        fi;
        if
        :: !needed && admitted < ROUNDS -> stage(); leave()
        :: else
        fi;
        atomic { taken = false; needed = false }
    } unless {
        atomic {
            kill?eval(name) -> taken = false;
            version = 0; chunk = 0; ticket = 0; slot = 0; last = 0; needed = false
        }
    }
}

/* pyps_push in push.c, and reclaim in reap.c */
proctype other(byte me) {
    byte version, chunk, ticket;
    {
end:    do
        :: d_step { admitted < ROUNDS -> close_round(); version = admitted } chunks_follow(); version = 0
        :: d_step { dead != NONE && !locked -> locked = true; ticket_hazard[dead] = 0; version = admitted }
           chunks_follow();
           version = 0
        od
    } unless { atomic { kill?eval(me) -> dead = me; version = 0; chunk = 0; ticket = 0 } }
}

init {
    byte i;
    atomic {
        run worker(FIRST);
        run worker(NEXT);
        run other(1);
        run other(2)
    }
    if
    :: kill!FIRST
    :: kill!1
    :: true
    fi;
    timeout;
    d_step {
        for (i : 0 .. CHUNKS - 1) {
            assert(words[i] == admitted)
        }
        for (i : 0 .. SLOTS - 1) {
            assert(ticket_hazard[i] == 0)
        }
        assert(!taken && admitted == ROUNDS)
    }
}
