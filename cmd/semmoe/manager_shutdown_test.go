package main

import (
	"context"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/semmoe/operator/internal/authority"
	"github.com/semmoe/operator/test/apiserver"
)

// TestManagerReleasesItsLease stops a leading manager that waits for a silent artifact store, while a client holds a silent connection. The
// manager exits with code 0 and releases its lease. A busy machine may exceed the limit of endGrace, so the test has five attempts.
func TestManagerReleasesItsLease(t *testing.T) {
	const namespace = "semmoe-system"
	server, err := apiserver.Start(&envtest.Environment{CRDDirectoryPaths: []string{filepath.Join("..", "..", "config", "crd")}, ErrorIfCRDPathMissing: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Stop() }) //nolint:errcheck // the processes end with this one
	clients, err := kubernetes.NewForConfig(server.Config)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := clients.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	issuer, err := authority.Load(t.Context(), clients, types.NamespacedName{Namespace: namespace, Name: "store"}, "store", time.Now())
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
	dir := t.TempDir()
	kubeconfig, token := filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "token")
	for file, text := range map[string][]byte{kubeconfig: server.KubeConfig, token: []byte("token")} {
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	holder := func(ctx context.Context) (string, error) {
		lease, err := clients.CoordinationV1().Leases(namespace).Get(ctx, "manager.semmoe.io", metav1.GetOptions{})
		if err != nil || lease.Spec.HolderIdentity == nil {
			return "", err
		}
		return *lease.Spec.HolderIdentity, nil
	}

	const attempts = 5
	for attempt := 1; ; attempt++ {
		silent, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		health := freeAddress(t)
		manager := startCommand(t, []string{"KUBECONFIG=" + kubeconfig, "POD_NAMESPACE=" + namespace},
			"manager", "--image=i", "--leader-elect", "--store-url=https://"+silent.Addr().String(), "--store-ca="+namespace+"/semmoe-store-ca",
			"--store-token-file="+token, "--metrics-bind-address="+freeAddress(t), "--health-probe-bind-address="+health)
		acceptOne(t, silent) // from the leader
		if name, err := holder(t.Context()); err != nil || name == "" {
			t.Fatalf("the lease of the leader has the holder %q: %v", name, err)
		}
		idle, err := net.Dial("tcp", health)
		if err != nil {
			t.Fatal(err)
		}
		response, err := http.Get("http://" + health + "/healthz") // the server accepts the silent connection before this one
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		err = manager.terminate(t)
		name, leaseErr := holder(t.Context())
		if err == nil && leaseErr == nil && name == "" {
			return
		}
		if attempt == attempts {
			t.Fatalf("the manager ends with %v; its lease has the holder %q: %v", err, name, leaseErr)
		}
		t.Logf("attempt %d: the manager ends with %v; its lease has the holder %q: %v", attempt, err, name, leaseErr)
		idle.Close()
		silent.Close()
	}
}
