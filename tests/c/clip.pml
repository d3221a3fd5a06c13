/* clip.pml: how participants find the norm of a round's gradient, in every interleaving.
 *
 * A member stages a gradient for one round after another in one staging buffer, with a word for each chunk's sum of
 * squares. It and two others complete the rounds, and one of the three may be killed between any two of its steps;
 * one that lives reclaims what the dead one held. A step is one access to shared memory; names are those of csrc.
 * Simpler than there:
 *
 *   - The gradient and each sum are the number of their ticket, so a sum that is lost, late or of another round shows.
 *   - A round has one source: others change what a sum is, not who may write it.
 *   - Chunks are words without buffers: chunk.pml has those.
 *   - Sums and chunks are taken in any order: parts and waiting decide no more.
 */

#ifndef CHUNKS
#define CHUNKS 2
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif

/* -DMUTANT=NO_RECHECK and so on: a protocol with one fault. */
#define NO_FAULT   0
#define NO_RECHECK 1 /* a participant does not read the chunk's word again */
#define NO_HAZARDS 2 /* the owner does not look at the hazards before it stages again */
#define NO_CLEAR   3 /* it does not clear the sums */
#define LATE_CLEAR 4 /* it clears them after admission */
#define PARTIAL    5 /* a step takes the norm of the sums that are there */
#define NO_RELEASE 6 /* the dead one's hazard is forgotten */
#define STOPPED    7 /* the dead one is merely slow */
#ifndef MUTANT
#define MUTANT NO_FAULT
#endif

#define SLOTS 3 /* the owner's is 0 */
#define NONE  7
#define BEING_STAGED 9

byte words[CHUNKS];  /* versions */
byte sums[CHUNKS];   /* 0, or of which ticket */
byte gradient;       /* of which ticket, or BEING_STAGED */
byte ticket_hazard[SLOTS];
byte admitted;       /* the view's version */
byte dead = NONE;    /* the slot of the process that is gone */
bool locked;         /* that slot's byte */

chan kill = [0] of { byte }; /* a process that receives it is dead, and its memory gone, in one step */

#define complete(version) (words[0] >= (version) && words[CHUNKS - 1] >= (version))

inline clear_sums() {
    do
    :: atomic { chunk == CHUNKS -> chunk = 0; break }
    :: atomic { chunk < CHUNKS -> sums[chunk] = 0; chunk++ }
    od
}

/* pyps_stage and pyps_push in push.c, after the ticket before is complete */
inline push() {
    do /* staging_has_reader in buffers.c: W2 of atomics.h */
    :: atomic { slot == SLOTS -> slot = 0; break }
    :: atomic { slot < SLOTS && (ticket_hazard[slot] != admitted || !admitted || MUTANT == NO_HAZARDS) -> slot++ }
    od;
    gradient = BEING_STAGED;
    if
    :: MUTANT != NO_CLEAR && MUTANT != LATE_CLEAR -> clear_sums()
    :: else
    fi;
    gradient = admitted + 1;
    admitted++;
    if
    :: MUTANT == LATE_CLEAR -> clear_sums()
    :: else
    fi
}

/* norm_of_ticket in clip_norm.c: brings every word to its sum, then reads them all */
inline norm_of_ticket() {
    other = 0;
    do
    :: atomic { other == CHUNKS -> break }
    :: other < CHUNKS ->
       if
       :: atomic { sums[other] != 0 || MUTANT == PARTIAL -> sum = 0 }
       :: atomic { sums[other] == 0 -> assert(gradient == ticket); sum = gradient }
          /* the CAS: another sum may be there by now */
          atomic {
              if
              :: sums[other] == 0 -> sums[other] = sum
              :: else
              fi;
              sum = 0
          }
       fi;
       atomic { assert(sums[other] == ticket); other++ }
    od;
    other = 0
}

/* apply in apply.c, of the ticket after the version that chunk_advance has read */
inline apply(at) {
    ticket_hazard[me] = ticket; /* R1 */
    if
    :: words[at] == ticket - 1 || MUTANT == NO_RECHECK -> /* R2 */
       norm_of_ticket();
       atomic {
           assert(gradient == ticket); /* the step reads the gradient until here */
           if
           :: words[at] == ticket - 1 -> words[at] = ticket
           :: else
           fi
       }
    :: else
    fi;
    atomic { ticket_hazard[me] = 0; ticket = 0 }
}

inline forget() {
    d_step { chunk = 0; slot = 0; other = 0; sum = 0; ticket = 0; goal = 0 }
}

proctype participant(byte me) {
    byte chunk, slot, other, sum, ticket, goal;
    {
end:    do
        :: atomic { words[0] < admitted -> ticket = words[0] + 1 } apply(0)
        :: atomic { words[CHUNKS - 1] < admitted -> ticket = words[CHUNKS - 1] + 1 } apply(CHUNKS - 1)
        :: me == 0 && admitted < ROUNDS && complete(admitted) -> push()
        :: atomic { dead != NONE && !locked -> locked = true; goal = admitted }
           do /* reclaim in reap.c */
           :: complete(goal) -> break
           :: atomic { words[0] < goal -> ticket = words[0] + 1 } apply(0)
           :: atomic { words[CHUNKS - 1] < goal -> ticket = words[CHUNKS - 1] + 1 } apply(CHUNKS - 1)
           od;
           atomic {
               if
               :: MUTANT != NO_RELEASE -> ticket_hazard[dead] = 0
               :: else
               fi;
               goal = 0
           }
        od
    } unless { atomic { kill?eval(me) -> dead = me; forget() } }
}

init {
    byte i;
    atomic {
        run participant(0);
        run participant(1);
        run participant(2)
    }
    if
    :: kill!0
    :: kill!1
    :: MUTANT == STOPPED -> dead = 1
    :: true
    fi;
    timeout;
    d_step {
        for (i : 0 .. CHUNKS - 1) {
            assert(words[i] == admitted)
        }
        for (i : 0 .. SLOTS - 1) {
            assert(ticket_hazard[i] == 0 || MUTANT == NO_RELEASE) /* that one shows in what is admitted */
        }
        assert(dead == 0 || admitted == ROUNDS)
    }
}
