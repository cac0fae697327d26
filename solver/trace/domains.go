// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"slices"
	"strings"
)

// DomainIndices returns the indices of named domains.
func (t *Trace) DomainIndices(names []string) ([]uint8, error) {
	var indices []uint8
	for _, name := range names {
		at := slices.Index(t.Model.Domains, name)
		switch {
		case t.Domains == nil || len(t.Model.Domains) == 0:
			return nil, fmt.Errorf("%q: the trace names no domains", name)
		case at < 0:
			return nil, fmt.Errorf("the trace has no domain %q; it has %s", name, strings.Join(t.Model.Domains, ", "))
		}
		indices = append(indices, uint8(at))
	}
	return indices, nil
}

// Without returns the requests outside the domains, which keep their split.
func (t *Trace) Without(domains []uint8) *Trace {
	var others []int
	for r := range t.Requests() {
		if !slices.Contains(domains, t.Domains[r]) {
			others = append(others, r)
		}
	}
	part := t.Subset(others)
	part.Digest = t.Digest // its documents are split as in the whole trace
	return part
}
