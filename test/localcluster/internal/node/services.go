// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"sync"
	"syscall"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/klog/v2"
)

// The address and port of the API server inside pods.
const (
	kubernetesServiceHost = "10.96.0.1"
	kubernetesServicePort = "443"
)

// backends maps a Service port, "namespace/service:port", to the addresses of its endpoints.
type backends map[string][]string

// forwarder listens on the cluster addresses of Services and forwards each connection to a random endpoint. A Service
// without an endpoint has no listener, so that connections of clients are refused immediately.
type forwarder struct {
	mu        sync.Mutex
	backends  backends
	listeners map[string]listener // by address
}

type listener struct {
	net.Listener
	service string // the key of its backends
}

func newForwarder() *forwarder { return &forwarder{listeners: map[string]listener{}} }

// update opens and closes listeners to match the given Services.
func (f *forwarder) update(services []*corev1.Service, endpointSlices []*discoveryv1.EndpointSlice) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.backends = findBackends(services, endpointSlices)
	wanted := clusterAddresses(services, f.backends)
	for address, l := range f.listeners {
		if wanted[address] != l.service {
			l.Close()
			delete(f.listeners, address)
		}
	}
	var errs []error
	for address, service := range wanted {
		if _, ok := f.listeners[address]; ok {
			continue
		}
		l, err := net.Listen("tcp", address)
		if err != nil {
			errs = append(errs, fmt.Errorf("service %s: %w", service, err))
			continue
		}
		f.listeners[address] = listener{l, service}
		go func() {
			if err := Forward(l, func() (net.Conn, error) { return f.dial(service) }); err != nil {
				klog.ErrorS(err, "Forwarding failed", "service", service)
			}
		}()
	}
	return errors.Join(errs...)
}

// dial connects to a random endpoint.
func (f *forwarder) dial(service string) (net.Conn, error) {
	f.mu.Lock()
	addresses := f.backends[service]
	f.mu.Unlock()
	if len(addresses) == 0 {
		return nil, fmt.Errorf("service %s has no endpoint", service)
	}
	return net.Dial("tcp", addresses[rand.IntN(len(addresses))])
}

// findBackends returns the endpoints of each Service port: the ready endpoints, or, if there is none, the terminating
// endpoints that still serve.
func findBackends(services []*corev1.Service, endpointSlices []*discoveryv1.EndpointSlice) backends {
	result := backends{}
	for _, s := range services {
		for _, port := range s.Spec.Ports {
			if port.Protocol != corev1.ProtocolTCP && port.Protocol != "" {
				continue
			}
			addresses := portBackends(s, port.Name, endpointSlices, ready)
			if len(addresses) == 0 {
				addresses = portBackends(s, port.Name, endpointSlices, servesWhileEnding)
			}
			if len(addresses) > 0 {
				result[serviceKey(s.Namespace, s.Name, int(port.Port))] = addresses
			}
		}
	}
	return result
}

func portBackends(s *corev1.Service, port string, endpointSlices []*discoveryv1.EndpointSlice, usable func(discoveryv1.Endpoint) bool) []string {
	var addresses []string
	for _, slice := range endpointSlices {
		if slice.Namespace != s.Namespace || slice.Labels[discoveryv1.LabelServiceName] != s.Name {
			continue
		}
		for _, p := range slice.Ports {
			if p.Port == nil || p.Name != nil && *p.Name != port || p.Name == nil && port != "" {
				continue
			}
			for _, e := range slice.Endpoints {
				if usable(e) {
					addresses = append(addresses, net.JoinHostPort(e.Addresses[0], strconv.Itoa(int(*p.Port))))
				}
			}
		}
	}
	slices.Sort(addresses)
	return slices.Compact(addresses)
}

func servesWhileEnding(e discoveryv1.Endpoint) bool {
	c := e.Conditions
	return c.Serving != nil && *c.Serving && c.Terminating != nil && *c.Terminating
}

// clusterAddresses maps the listen addresses to the keys of their backends.
func clusterAddresses(services []*corev1.Service, known backends) map[string]string {
	result := map[string]string{}
	for _, s := range services {
		if s.Spec.ClusterIP == "" || s.Spec.ClusterIP == corev1.ClusterIPNone {
			continue
		}
		for _, port := range s.Spec.Ports {
			key := serviceKey(s.Namespace, s.Name, int(port.Port))
			if known[key] != nil {
				result[net.JoinHostPort(s.Spec.ClusterIP, strconv.Itoa(int(port.Port)))] = key
			}
		}
	}
	return result
}

func serviceKey(namespace, name string, port int) string {
	return fmt.Sprintf("%s/%s:%d", namespace, name, port)
}

// Forward forwards each connection of l to a connection that dial returns, until l is closed. If dial fails, the
// client's connection is reset.
func Forward(l net.Listener, dial func() (net.Conn, error)) error {
	for {
		client, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if errors.Is(err, syscall.ECONNABORTED) {
			continue
		}
		if err != nil {
			return err
		}
		go func() {
			server, err := dial()
			if err != nil {
				_ = client.(*net.TCPConn).SetLinger(0)
				client.Close()
				return
			}
			join(client.(*net.TCPConn), server.(*net.TCPConn))
		}()
	}
}

// join copies both directions until both sides have finished sending.
func join(a, b *net.TCPConn) {
	var both sync.WaitGroup
	copyHalf := func(to, from *net.TCPConn) {
		if _, err := io.Copy(to, from); err != nil {
			// An error resets both sides, even if one side still sends.
			_ = to.SetLinger(0)
			to.Close()
			from.Close()
			return
		}
		_ = to.CloseWrite()
	}
	both.Go(func() { copyHalf(a, b) })
	both.Go(func() { copyHalf(b, a) })
	both.Wait()
	a.Close()
	b.Close()
}
