// SPDX-License-Identifier: Apache-2.0

package picker

import (
	"net/netip"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/types/known/structpb"
)

const (
	subsetNamespace = "envoy.lb.subset_hint"
	subsetKey       = "x-gateway-destination-endpoint-subset"
)

// Subset contains the endpoints that a gateway allows.
type Subset struct {
	endpoints map[netip.AddrPort]bool
	// hosts contains addresses of which every port is allowed.
	hosts map[netip.Addr]bool
}

// subsetOf reads the subset hint of a request; nil if there is none. A hint without any readable endpoint allows none:
// ignoring it could send a request where it must not go.
func subsetOf(metadata *corev3.Metadata) *Subset {
	value, present := metadata.GetFilterMetadata()[subsetNamespace].GetFields()[subsetKey]
	if !present {
		return nil
	}
	s := &Subset{endpoints: map[netip.AddrPort]bool{}, hosts: map[netip.Addr]bool{}}
	switch kind := value.GetKind().(type) {
	case *structpb.Value_StringValue:
		for part := range strings.SplitSeq(kind.StringValue, ",") {
			s.add(part)
		}
	case *structpb.Value_ListValue:
		for _, element := range kind.ListValue.GetValues() {
			s.add(element.GetStringValue())
		}
	}
	return s
}

// add parses ip:port, or an IP address, which allows all its ports.
func (s *Subset) add(text string) {
	text = strings.TrimSpace(text)
	if endpoint, err := netip.ParseAddrPort(text); err == nil {
		s.endpoints[unmapped(endpoint)] = true
	} else if host, err := netip.ParseAddr(strings.Trim(text, "[]")); err == nil {
		s.hosts[host.Unmap()] = true
	}
}

// Contains reports whether an endpoint, ip:port, is allowed.
func (s *Subset) Contains(endpoint string) bool {
	parsed, err := netip.ParseAddrPort(endpoint)
	if err != nil {
		return false
	}
	parsed = unmapped(parsed)
	return s.endpoints[parsed] || s.hosts[parsed.Addr()]
}

// unmapped converts an IPv4-mapped IPv6 address to IPv4.
func unmapped(endpoint netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(endpoint.Addr().Unmap(), endpoint.Port())
}
