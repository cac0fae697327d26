// SPDX-License-Identifier: Apache-2.0

package node

import (
	"net"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func service(name, clusterIP string, ports ...corev1.ServicePort) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
		Spec:       corev1.ServiceSpec{ClusterIP: clusterIP, Ports: ports},
	}
}

func sliceOf(service string, port int32, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: service, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		Ports:      []discoveryv1.EndpointPort{{Name: new(string), Port: &port}},
		Endpoints:  endpoints,
	}
}

func endpoint(address string, ready, serving, terminating bool) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{
		Addresses:  []string{address},
		Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating},
	}
}

func TestBackends(t *testing.T) {
	tcp := corev1.ServicePort{Port: 80, Protocol: corev1.ProtocolTCP}
	services := []*corev1.Service{
		service("good", "10.96.0.2", tcp),
		service("ending", "10.96.0.3", tcp),
		service("empty", "10.96.0.4", tcp),
		service("headless", corev1.ClusterIPNone, tcp),
		service("udp", "10.96.0.5", corev1.ServicePort{Port: 53, Protocol: corev1.ProtocolUDP}),
		service("named", "10.96.0.6", corev1.ServicePort{Port: 80, Name: "http"}),
	}
	slices := []*discoveryv1.EndpointSlice{
		sliceOf("good", 8080, endpoint("10.244.0.2", true, true, false), endpoint("10.244.0.1", true, true, false), endpoint("10.244.0.3", false, true, true)),
		sliceOf("ending", 8080, endpoint("10.244.0.4", false, true, true), endpoint("10.244.0.5", false, false, true)),
		sliceOf("empty", 8080, endpoint("10.244.0.6", false, false, false)),
		sliceOf("headless", 8080, endpoint("10.244.0.7", true, true, false)),
		sliceOf("udp", 8080, endpoint("10.244.0.8", true, true, false)),
		sliceOf("named", 8080, endpoint("10.244.0.9", true, true, false)),
	}
	found := findBackends(services, slices)
	if diff := cmp.Diff(backends{
		"ns/good:80":     {"10.244.0.1:8080", "10.244.0.2:8080"},
		"ns/ending:80":   {"10.244.0.4:8080"},
		"ns/headless:80": {"10.244.0.7:8080"},
	}, found); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(map[string]string{"10.96.0.2:80": "ns/good:80", "10.96.0.3:80": "ns/ending:80"}, clusterAddresses(services, found)); diff != "" {
		t.Error(diff)
	}
}

func TestHosts(t *testing.T) {
	web := endpoint("10.244.0.7", true, true, false)
	web.Hostname = new("web-0")
	names := hostNames(
		[]*corev1.Service{service("good", "10.96.0.2"), service("headless", corev1.ClusterIPNone), service("external", "")},
		[]*discoveryv1.EndpointSlice{sliceOf("good", 1, web), sliceOf("headless", 1, web, endpoint("10.244.0.8", false, true, true))},
	)
	const common = "127.0.0.1 localhost\n::1 localhost\n"
	want := common +
		"10.96.0.2 good.ns.svc.cluster.local good.ns.svc good.ns good\n" +
		"10.244.0.7 headless.ns.svc.cluster.local headless.ns.svc headless.ns headless\n" +
		"10.244.0.7 web-0.headless.ns.svc.cluster.local web-0.headless.ns.svc web-0.headless.ns web-0.headless\n"
	if diff := cmp.Diff(want, string(renderHosts("ns", names))); diff != "" {
		t.Error(diff)
	}
	want = common +
		"10.96.0.2 good.ns.svc.cluster.local good.ns.svc good.ns\n" +
		"10.244.0.7 headless.ns.svc.cluster.local headless.ns.svc headless.ns\n" +
		"10.244.0.7 web-0.headless.ns.svc.cluster.local web-0.headless.ns.svc web-0.headless.ns\n"
	if diff := cmp.Diff(want, string(renderHosts("other", names))); diff != "" {
		t.Error(diff)
	}
}

func TestAddressPool(t *testing.T) {
	pool, err := newAddressPool("10.244.0.0/30")
	if err != nil {
		t.Fatal(err)
	}
	take := func() string {
		address, err := pool.take()
		if err != nil {
			t.Fatal(err)
		}
		return address
	}
	got := []string{take(), take(), take()}
	if diff := cmp.Diff([]string{"10.244.0.1", "10.244.0.2", "10.244.0.3"}, got); diff != "" {
		t.Error(diff)
	}
	if address, err := pool.take(); err == nil {
		t.Errorf("got %s from a full pool, want an error", address)
	}
	pool.put("10.244.0.2")
	if again := take(); again != "10.244.0.2" {
		t.Errorf("got %s, want the free address", again)
	}
}

// TestForwardHalfClose sends a request and closes its sending side. The response must still arrive, because HTTP/1.0
// clients and netcat behave in this way.
func TestForwardHalfClose(t *testing.T) {
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go func() {
		connection, err := server.Accept()
		if err != nil {
			return
		}
		defer connection.Close()
		data := make([]byte, 16)
		n := 0
		for {
			m, err := connection.Read(data[n:])
			n += m
			if err != nil {
				break
			}
		}
		_, _ = connection.Write(append([]byte("got "), data[:n]...))
	}()
	front, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		ended <- Forward(front, func() (net.Conn, error) { return net.Dial("tcp", server.Addr().String()) })
	}()
	client, err := net.Dial("tcp", front.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if _, err := client.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	if err := client.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, 16)
	n, err := client.Read(answer)
	if err != nil || string(answer[:n]) != "got ping" {
		t.Errorf("got %q (%v)", answer[:n], err)
	}
	front.Close()
	if err := <-ended; err != nil {
		t.Errorf("error after the listener was closed: %v, want none", err)
	}
}
