// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
)

const (
	storeNamespace = "semmoe-system"
	storeName      = "semmoe-store"
	managerName    = "semmoe-manager"
	// tokenSeconds exceeds the duration of any run of the suite, because no kubelet renews the manager's tokens here.
	tokenSeconds = 6 * 3600
)

var installStore = sync.OnceValues(func() (*access.Access, error) {
	return installStoreIn(context.Background())
})

// startStore returns access to the artifact store, which is installed from config/store once for the whole suite.
// Managers in this process and tests use it with the manager's rights.
func startStore(t *testing.T) *access.Access {
	t.Helper()
	store, err := installStore()
	if err != nil {
		t.Fatalf("failed to install the artifact store: %v", err)
	}
	return store
}

func installStoreIn(ctx context.Context) (*access.Access, error) {
	ctx, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	if err := createStoreVolume(ctx); err != nil {
		return nil, err
	}
	// Simulate the ConfigMap of a previous store with a lost certificate authority. The new store must overwrite it.
	ca := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: storeNamespace, Name: storeName + "-ca"}, Data: map[string]string{"ca.crt": "lost"}}
	if err := api.Create(ctx, ca); err != nil {
		return nil, err
	}
	if err := applyAll(ctx, filepath.Join(repository, "config", "store", "store.yaml")); err != nil {
		return nil, err
	}
	address, err := cluster.Forward(ctx, storeNamespace, storeName, 443)
	if err != nil {
		return nil, err
	}
	tokenFile := filepath.Join(clusterDir(), "store-token")
	manager := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: storeNamespace, Name: managerName}}
	if err := writeStoreToken(ctx, manager, tokenFile); err != nil {
		return nil, err
	}
	reader, err := client.New(managerConfig, client.Options{Scheme: api.Scheme()})
	if err != nil {
		return nil, err
	}
	store := &access.Access{
		// The URL has the name in the store's certificate, which pods in the cluster use.
		URL:       "https://" + storeName + "." + storeNamespace + ".svc",
		TokenFile: tokenFile,
		CA:        types.NamespacedName{Namespace: storeNamespace, Name: storeName + "-ca"},
		Reader:    reader,
		Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, address)
		},
	}
	return store, waitForStore(ctx, store)
}

// clusterDir is removed with the cluster.
func clusterDir() string { return filepath.Dir(cluster.Kubeconfig()) }

// storeDir returns the directory in which the store keeps artifacts.
func storeDir() string { return filepath.Join(clusterDir(), "store-volume") }

// createStoreVolume creates a volume with a directory for the store's claim, because the local cluster has no
// provisioner.
func createStoreVolume(ctx context.Context) error {
	directory := storeDir()
	if err := os.Mkdir(directory, 0o700); err != nil {
		return err
	}
	return api.Create(ctx, &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: storeName},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:               corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("20Gi")},
			AccessModes:            []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: directory}},
		},
	})
}

// writeStoreToken writes a store token of the account to a file. Unlike a pod's token it is not bound to a pod.
func writeStoreToken(ctx context.Context, account *corev1.ServiceAccount, file string) error {
	token, err := newToken(ctx, account, artifact.Audience)
	if err != nil {
		return err
	}
	return os.WriteFile(file, []byte(token), 0o600)
}

// newToken returns a token of a service account. Without audiences the token is for the API server.
func newToken(ctx context.Context, account *corev1.ServiceAccount, audiences ...string) (string, error) {
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: audiences, ExpirationSeconds: ptr.To[int64](tokenSeconds)}}
	err := api.SubResource("token").Create(ctx, account, request)
	return request.Status.Token, err
}

// waitForStore waits until the store answers a request with the manager's token.
func waitForStore(ctx context.Context, store *access.Access) error {
	for {
		err := tryStore(ctx, store)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the store is not ready in time: %w", err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func tryStore(ctx context.Context, store *access.Access) error {
	client, err := store.Client(ctx)
	if err != nil {
		return err
	}
	_, err = client.ListAll(ctx)
	return err
}

// TestStore checks that the store from config/store keeps the manager's artifacts and authenticates clients.
func TestStore(t *testing.T) {
	t.Parallel()
	store := startStore(t)
	manager, err := store.Client(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	scope := artifact.Scope{Namespace: newNamespace(t), Kind: artifact.Plan, ID: "0123456789abcdef"}
	const content = "tables"
	digest, err := manager.Put(t.Context(), scope, strings.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	body, err := manager.Get(t.Context(), scope, digest)
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	if got, err := io.ReadAll(body); err != nil || string(got) != content {
		t.Errorf("read %q, %v", got, err)
	}

	// The store rejects another service account: its token is bound to no pod.
	other := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: scope.Namespace, Name: "other"}}
	create(t, other)
	file := filepath.Join(t.TempDir(), "token")
	if err := writeStoreToken(t.Context(), other, file); err != nil {
		t.Fatal(err)
	}
	stranger := &access.Access{URL: store.URL, TokenFile: file, CA: store.CA, Reader: store.Reader, Dial: store.Dial}
	client, err := stranger.Client(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, err = client.Get(t.Context(), scope, digest)
	var refused *artifact.StatusError
	if !errors.As(err, &refused) || refused.Code != http.StatusUnauthorized {
		t.Errorf("the error for another service account is %v, want 401", err)
	}
}
