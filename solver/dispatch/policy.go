// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"fmt"
	"strings"
)

// Policy is the name of a strategy that assigns requests to ranks.
type Policy string

// The policies.
const (
	// Price selects the place with the highest value among the ranks below the cap: affinity and reused prefix minus
	// price and load (see Decision). Prices are Lagrangian prices that rise with load.
	Price Policy = "price"
	// Masked selects the best score among the ranks that have not received a request in the current round.
	Masked Policy = "masked"
	// Window assigns a queue of requests optimally, the same number to each rank.
	Window Policy = "window"
	// Late is Price with late binding: a request waits until its best place is available, for a bounded time (see
	// WaitQueue).
	Late Policy = "late"
	// RoundRobin selects the ranks in cyclic order.
	RoundRobin Policy = "round-robin"
	// LeastLoaded selects the place with the fewest outstanding tokens.
	LeastLoaded Policy = "least-loaded"
	// Prefix selects the place with the longest cached prefix of the request, among the ranks below the cap.
	Prefix Policy = "prefix"
)

// Policies lists all policies.
var Policies = []Policy{Price, Masked, Window, Late, RoundRobin, LeastLoaded, Prefix}

// ParsePolicy returns the policy with the given name.
func ParsePolicy(name string) (Policy, error) {
	for _, p := range Policies {
		if string(p) == name {
			return p, nil
		}
	}
	return "", fmt.Errorf("policy %q is unknown; allowed is %s", name, strings.Trim(fmt.Sprint(Policies), "[]"))
}

// Weighs reports whether the policy supports unequal load shares of ranks.
func (p Policy) Weighs() bool { return p == Price || p == Late || p == LeastLoaded || p == Prefix }

// ReadsPrefixes reports whether the policy uses cached prefixes: it prefers places that have them, or balances the
// tokens that are left to compute. RoundRobin and Masked count requests.
func (p Policy) ReadsPrefixes() bool { return p != RoundRobin && p != Masked }

// AtOnce reports whether the policy decides on a request at its arrival, as a Scheduler does.
func (p Policy) AtOnce() bool { return p != Window && p != Late }
