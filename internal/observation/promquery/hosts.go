// SPDX-License-Identifier: Apache-2.0

package promquery

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"syscall"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	// maxHeader limits the header of a response, in bytes.
	maxHeader = 64 << 10
	// notAllowed is the message for an address that no rule allows.
	notAllowed = "spec.drift.prometheus.address is invalid: a Service of this namespace with a cluster IP (<name>.<namespace>.svc), or a host that the operator lists (--prometheus-hosts), is required"
)

// Hosts lists the hosts that objects of all namespaces may refer to: "host", or "host:port" for one port only. A host
// is a DNS name or an IP address.
type Hosts []string

// ParseHosts validates a list of hosts.
func ParseHosts(list []string) (Hosts, error) {
	var hosts Hosts
	for _, entry := range list {
		host, port := entry, ""
		if _, err := netip.ParseAddr(entry); err != nil && strings.Contains(entry, ":") {
			if host, port, err = net.SplitHostPort(entry); err != nil || port == "" {
				host = ""
			}
		}
		host = strings.ToLower(host)
		address, err := netip.ParseAddr(host)
		isName := err != nil && len(validation.IsDNS1123Subdomain(host)) == 0
		if !isName && (err != nil || forbidden(address)) || port != "" && !isPort(port) {
			return nil, fmt.Errorf("%q is invalid: a DNS name or an IP address that is not link-local, optionally with a port, is required", entry)
		}
		if port != "" {
			host = net.JoinHostPort(host, port)
		}
		hosts = append(hosts, host)
	}
	return hosts, nil
}

func isPort(text string) bool {
	n, err := net.LookupPort("tcp", text)
	return err == nil && n > 0 && strings.Trim(text, "0123456789") == ""
}

// Allows reports whether an object of a namespace may refer to an address: its host is listed, or has the form of a
// Service of the namespace.
func (h Hosts) Allows(address, namespace string) bool {
	u, err := parseAddress(address)
	return err == nil && (h.lists(u) || serviceOf(u, namespace) != "")
}

// lists reports whether the host of a URL is listed, for the port of the URL or for all ports.
func (h Hosts) lists(u *url.URL) bool {
	return slices.Contains(h, hostOf(u)) || slices.Contains(h, net.JoinHostPort(hostOf(u), portOf(u)))
}

// parseAddress parses the address of a server: http or https with a host, without credentials.
func parseAddress(address string) (*url.URL, error) {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return nil, errors.New("the address is not http:// or https:// with a host")
	}
	return u, nil
}

func hostOf(u *url.URL) string { return strings.TrimSuffix(strings.ToLower(u.Hostname()), ".") }

func portOf(u *url.URL) string {
	if port := u.Port(); port != "" {
		return port
	}
	return map[string]string{"http": "80", "https": "443"}[u.Scheme]
}

// serviceOf returns the name of the Service in a namespace that a URL refers to. It is empty for other URLs.
func serviceOf(u *url.URL, namespace string) string {
	host := strings.TrimSuffix(hostOf(u), ".cluster.local")
	name, found := strings.CutSuffix(host, "."+namespace+".svc")
	if !found || strings.Contains(name, ".") {
		return ""
	}
	return name
}

// route returns a transport that only reaches the server of a query. The resolved address is checked when it is dialed.
// A Service is dialed at its cluster IP, because a DNS response for a Service can be any address (ExternalName).
func (c *Client) route(ctx context.Context, q Query) (http.RoundTripper, error) {
	u, err := parseAddress(q.Address)
	if err != nil {
		return nil, &Error{Reason: NotAllowed, Message: notAllowed, Cause: err}
	}
	dialer := &net.Dialer{Timeout: timeout}
	dial := dialer.DialContext
	if c.Hosts.lists(u) {
		_, err := netip.ParseAddr(hostOf(u))
		literal := err == nil
		dialer.Control = func(_, address string, _ syscall.RawConn) error { return checkDialled(address, literal) }
	} else {
		address, err := c.clusterIP(ctx, q.Namespace, serviceOf(u, q.Namespace))
		if err != nil {
			return nil, err
		}
		target := net.JoinHostPort(address, portOf(u))
		dialer.Control = func(_, address string, _ syscall.RawConn) error { return checkDialled(address, false) }
		dial = func(ctx context.Context, network, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, network, target)
		}
	}
	if c.Transport != nil {
		return c.Transport, nil
	}
	return &http.Transport{
		DialContext: dial, DisableKeepAlives: true, ForceAttemptHTTP2: true, TLSHandshakeTimeout: timeout, MaxResponseHeaderBytes: maxHeader,
	}, nil
}

// clusterIP returns the address of a Service. Headless Services and those of type ExternalName have none.
func (c *Client) clusterIP(ctx context.Context, namespace, name string) (string, error) {
	refused := &Error{Reason: NotAllowed, Message: notAllowed}
	if name == "" || c.Services == nil {
		return "", refused
	}
	var services corev1.ServiceList
	err := c.Services.List(ctx, &services, client.InNamespace(namespace), client.MatchingFields{"metadata.name": name}, client.Limit(1))
	if err != nil {
		return "", fmt.Errorf("failed to get Service %s/%s: %w", namespace, name, err)
	}
	if len(services.Items) == 0 {
		refused.Cause = fmt.Errorf("the Service %s/%s does not exist", namespace, name)
		return "", refused
	}
	spec := services.Items[0].Spec
	if _, err := netip.ParseAddr(spec.ClusterIP); err != nil || spec.Type == corev1.ServiceTypeExternalName {
		refused.Cause = fmt.Errorf("the Service %s/%s has no cluster IP", namespace, name)
		return "", refused
	}
	return spec.ClusterIP, nil
}

// checkDialled rejects addresses of cloud metadata services and of this node. A loopback address is allowed only if it
// is listed as a literal IP address.
func checkDialled(address string, literal bool) error {
	resolved, err := netip.ParseAddrPort(address)
	if err != nil {
		return err
	}
	if ip := unmap(resolved.Addr()); forbidden(ip) || ip.IsLoopback() && !literal {
		return fmt.Errorf("the address %s is not allowed", ip)
	}
	return nil
}

var (
	nat64 = netip.MustParsePrefix("64:ff9b::/96")
	// metadata lists the addresses of cloud metadata services that are not link-local.
	metadata = []netip.Addr{netip.MustParseAddr("fd00:ec2::254"), netip.MustParseAddr("100.100.100.200"), netip.MustParseAddr("168.63.129.16")}
)

// forbidden reports whether no server may have the address, listed or not.
func forbidden(address netip.Addr) bool {
	address = unmap(address)
	return address.IsLinkLocalUnicast() || address.IsMulticast() || address.IsUnspecified() || slices.Contains(metadata, address)
}

// unmap returns the IPv4 address that an IPv6 address represents, or the address itself.
func unmap(address netip.Addr) netip.Addr {
	address = address.Unmap().WithZone("")
	if nat64.Contains(address) {
		bytes := address.As16()
		return netip.AddrFrom4([4]byte(bytes[12:]))
	}
	return address
}
