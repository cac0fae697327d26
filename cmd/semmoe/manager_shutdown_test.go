// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/internal/certs"
	"github.com/semmoe/operator/test/apiserver"
	"github.com/semmoe/operator/test/ports"
	"github.com/semmoe/operator/test/tier"
)

// TestLeadingManagerEnds stops a leading manager that waits for a silent artifact store, while a client holds a silent
// connection. The manager exits with code 0 and releases its lease. It also exits with code 0 if the API server does
// not respond or is unreachable. A busy machine may exceed the limit of endGrace, so each case has five attempts.
func TestLeadingManagerEnds(t *testing.T) {
	const namespace = "semmoe-system"
	server, err := apiserver.Start(&envtest.Environment{CRDDirectoryPaths: []string{filepath.Join("..", "..", "config", "crd")}, ErrorIfCRDPathMissing: true})
	tier.Require(t, err)
	t.Cleanup(func() { server.Stop() }) //nolint:errcheck // the processes end with this one
	clients, err := kubernetes.NewForConfig(server.Config)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := clients.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	issuer, err := certs.Load(t.Context(), clients, types.NamespacedName{Namespace: namespace, Name: "store"}, "store", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	bundle, err := issuer.Bundle()
	if err != nil {
		t.Fatal(err)
	}
	published := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "semmoe-store-ca"}, Data: map[string]string{"ca.crt": string(bundle)}}
	if _, err := clients.CoreV1().ConfigMaps(namespace).Create(t.Context(), published, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	token := clitest.WriteFile(t, "token", "token")
	holder := func(ctx context.Context) (string, error) {
		lease, err := clients.CoordinationV1().Leases(namespace).Get(ctx, "manager.semmoe.io", metav1.GetOptions{})
		if err != nil || lease.Spec.HolderIdentity == nil {
			return "", err
		}
		return *lease.Spec.HolderIdentity, nil
	}

	address := strings.Trim(strings.TrimPrefix(server.Config.Host, "https://"), "/")
	for _, how := range []string{"", silent, refusing} {
		t.Run("API server "+cmp.Or(how, "there"), func(t *testing.T) {
			const attempts = 5
			for attempt := 1; ; attempt++ {
				store, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				proxy := startProxy(t, address)
				kubeconfig := clitest.WriteFile(t, "kubeconfig", strings.ReplaceAll(string(server.KubeConfig), address, proxy.Addr().String()))
				health := ports.Address(t)
				manager := clitest.Start(t, []string{"KUBECONFIG=" + kubeconfig, "POD_NAMESPACE=" + namespace},
					"manager", "--image=i", "--leader-elect", "--store-url=https://"+store.Addr().String(), "--store-ca="+namespace+"/semmoe-store-ca",
					"--store-token-file="+token, "--metrics-bind-address="+ports.Address(t), "--health-probe-bind-address="+health)
				acceptOne(t, store) // from the leader
				if name, err := holder(t.Context()); err != nil || name == "" {
					t.Fatalf("the lease of the leader has the holder %q: %v", name, err)
				}
				var idle net.Conn
				manager.WaitFor(t, func() bool { // a leader may use the store before the health server listens
					idle, err = net.Dial("tcp", health)
					return err == nil
				})
				response, err := http.Get("http://" + health + "/healthz") // the server accepts the silent connection before this one
				if err != nil {
					t.Fatal(err)
				}
				response.Body.Close()
				if proxy.away(how) == 0 {
					t.Fatal("the manager does not use the proxy")
				}
				err = manager.Terminate(t)
				name, leaseErr := holder(t.Context())
				released := name == "" || how != ""
				if err == nil && leaseErr == nil && released {
					if name != "" {
						dropLease(t, clients, namespace)
					}
					return
				}
				if attempt == attempts {
					t.Fatalf("the manager ends with %v; its lease has the holder %q: %v", err, name, leaseErr)
				}
				t.Logf("attempt %d: the manager ends with %v; its lease has the holder %q: %v", attempt, err, name, leaseErr)
				dropLease(t, clients, namespace)
				idle.Close()
				store.Close()
			}
		})
	}
}

// dropLease deletes the leader lease, so that the next manager does not wait for its expiry.
func dropLease(t *testing.T, clients kubernetes.Interface, namespace string) {
	t.Helper()
	if err := clients.CoordinationV1().Leases(namespace).Delete(t.Context(), "manager.semmoe.io", metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
}

// proxy forwards connections to an address until it is disabled.
type proxy struct {
	net.Listener
	mu     sync.Mutex
	open   []net.Conn
	hidden bool
}

// startProxy starts a proxy that ends with the test.
func startProxy(t *testing.T, to string) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{Listener: listener}
	go func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return
			}
			p.pass(from, to)
		}
	}()
	t.Cleanup(func() { p.away(refusing) })
	return p
}

// pass copies data in both directions. Connections after away are not forwarded.
func (p *proxy) pass(from net.Conn, to string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open = append(p.open, from)
	if p.hidden {
		return
	}
	onward, err := net.Dial("tcp", to)
	if err != nil {
		from.Close()
		return
	}
	p.open = append(p.open, onward)
	for _, ends := range [][2]net.Conn{{from, onward}, {onward, from}} {
		go func() {
			buffer := make([]byte, 32<<10)
			for {
				n, err := ends[0].Read(buffer)
				p.mu.Lock()
				hidden := p.hidden
				p.mu.Unlock()
				if hidden {
					return
				}
				if _, writeErr := ends[1].Write(buffer[:n]); err != nil || writeErr != nil {
					ends[0].Close()
					ends[1].Close()
					return
				}
			}
		}()
	}
}

// away makes the server behind the proxy silent, or refuse connections. It returns the number of connections so far.
func (p *proxy) away(how string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hidden = how != ""
	if how == refusing {
		p.Close() //nolint:errcheck // it may be closed
		for _, connection := range p.open {
			connection.Close()
		}
	}
	return len(p.open)
}
