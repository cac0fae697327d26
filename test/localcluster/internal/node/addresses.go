// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"net/netip"
	"sync"
)

// addressPool allocates the addresses of a range. A released address is reused as late as possible: a client that still
// uses the address should get no connection instead of a connection to an unrelated pod.
type addressPool struct {
	mu     sync.Mutex
	prefix netip.Prefix
	next   netip.Addr
	taken  map[netip.Addr]bool
}

// newAddressPool returns a pool without the first address of the range, which is the network address.
func newAddressPool(cidr string) (*addressPool, error) {
	prefix, err := netip.ParsePrefix(cidr)
	if err != nil {
		return nil, err
	}
	return &addressPool{prefix: prefix.Masked(), next: prefix.Masked().Addr().Next(), taken: map[netip.Addr]bool{}}, nil
}

func (p *addressPool) take() (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for start := p.next; ; {
		address := p.next
		p.next = p.next.Next()
		if !p.prefix.Contains(p.next) {
			p.next = p.prefix.Addr().Next()
		}
		if !p.taken[address] {
			p.taken[address] = true
			return address.String(), nil
		}
		if p.next == start {
			return "", fmt.Errorf("all addresses of %s are in use", p.prefix)
		}
	}
}

func (p *addressPool) put(address string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if a, err := netip.ParseAddr(address); err == nil {
		delete(p.taken, a)
	}
}
