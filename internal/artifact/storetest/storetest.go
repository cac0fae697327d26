// SPDX-License-Identifier: Apache-2.0

// Package storetest runs the artifact store with a real API server, for tests of its clients.
package storetest

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/artifact/store"
	"github.com/semmoe/operator/test/apiserver"
	"github.com/semmoe/operator/test/localcluster"
)

const namespace = "semmoe-system"

// authority is the name of the Secret and the ConfigMap of the store's CA.
var authority = types.NamespacedName{Namespace: namespace, Name: "semmoe-store-ca"}

// Environment is an API server with the objects of a store installation and the CRDs of this project.
type Environment struct {
	// Config is the configuration of an administrator.
	Config *rest.Config
	// Clients are the clients of an administrator.
	Clients kubernetes.Interface
	server  *apiserver.Server
}

// Start starts an API server. configure may change its flags. Stop stops it. Start is slow: call it once, from
// TestMain.
func Start(ctx context.Context, configure ...func(*envtest.APIServer)) (*Environment, error) {
	binaries, err := localcluster.FindBinaries()
	if err != nil {
		return nil, err
	}
	// The binaries are in bin, two levels above the package directories.
	config := filepath.Join(filepath.Dir(filepath.Dir(binaries)), "config")
	server := &envtest.Environment{CRDDirectoryPaths: []string{filepath.Join(config, "crd")}, ErrorIfCRDPathMissing: true}
	for _, c := range configure {
		c(server.ControlPlane.GetAPIServer())
	}
	e := &Environment{}
	if e.server, err = apiserver.Start(server); err != nil {
		return nil, err
	}
	e.Config = e.server.Config
	if e.Clients, err = kubernetes.NewForConfig(e.Config); err == nil {
		err = e.install(ctx, filepath.Join(config, "store", "rbac.yaml"))
	}
	if err != nil {
		return nil, errors.Join(err, e.server.Stop())
	}
	return e, nil
}

// Stop stops the API server.
func (e *Environment) Stop() error { return e.server.Stop() }

func (e *Environment) install(ctx context.Context, manifest string) error {
	if _, err := e.Clients.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{}); err != nil {
		return err
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "semmoe-manager"}}
	if _, err := e.Clients.CoreV1().ServiceAccounts(namespace).Create(ctx, account, metav1.CreateOptions{}); err != nil {
		return err
	}
	objects, err := client.New(e.Config, client.Options{})
	if err != nil {
		return err
	}
	file, err := os.Open(manifest)
	if err != nil {
		return err
	}
	defer file.Close()
	for documents := yaml.NewYAMLOrJSONDecoder(file, 4096); ; {
		u := &unstructured.Unstructured{}
		if err := documents.Decode(u); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := objects.Create(ctx, u); err != nil {
			return err
		}
	}
}

// Store is a running store.
type Store struct {
	// Access connects as the manager, also after a restart of the store.
	Access *access.Access

	environment *Environment
	dir         string
	mu          sync.Mutex
	address     string
	stop        func()
}

// Run starts a store with a separate directory. The store runs until the end of the test, or until Stop.
func (e *Environment) Run(t testing.TB) *Store {
	t.Helper()
	s := &Store{environment: e, dir: t.TempDir()}
	s.Access = &access.Access{URL: "https://127.0.0.1", TokenFile: e.tokenFile(t), CA: authority, Reader: e.reader(t), Dial: s.dial}
	s.Start(t)
	t.Cleanup(func() { s.Stop() })
	return s
}

func (s *Store) dial(ctx context.Context, network, _ string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, network, s.Address())
}

// Address returns the address of the store, for a manager in a separate process.
func (s *Store) Address() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.address
}

// Damage changes the stored bytes of an artifact, like a disk error.
func (s *Store) Damage(t testing.TB, scope artifact.Scope, digest artifact.Digest) {
	t.Helper()
	path := filepath.Join(s.dir, strings.Join([]string{scope.Namespace, string(scope.Kind), scope.ID, string(digest)}, "."))
	data, err := os.ReadFile(path)
	if err == nil {
		data[len(data)/2] ^= 1
		err = os.WriteFile(path, data, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Start starts the store again after Stop.
func (s *Store) Start(t testing.TB) {
	t.Helper()
	config := rest.CopyConfig(s.environment.Config)
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + namespace + ":semmoe-store"}
	config.QPS, config.Burst = 100, 100
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended, up := make(chan error, 1), make(chan string, 1)
	options := store.Options{
		URL: "file://" + s.dir, BindAddress: "127.0.0.1:0", MetricsAddress: "127.0.0.1:0", Authority: authority, TLSHosts: []string{"127.0.0.1"},
		Manager: types.NamespacedName{Namespace: namespace, Name: "semmoe-manager"}, MaxArtifactBytes: 64 << 20,
	}
	go func() {
		ended <- store.Run(ctx, clients, options, func(service, _ net.Addr) { up <- service.String() })
	}()
	select {
	case address := <-up:
		s.mu.Lock()
		s.address = address
		s.mu.Unlock()
	case err := <-ended:
		cancel()
		t.Fatal(err)
	}
	s.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the store exited with %v", err)
		}
	})
}

// Stop stops the store and keeps its data.
func (s *Store) Stop() { s.stop() }

// Client returns the client of the manager.
func (s *Store) Client(t testing.TB) *access.Client {
	t.Helper()
	c, err := s.Access.Client(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (e *Environment) reader(t testing.TB) client.Reader {
	t.Helper()
	reader, err := client.New(e.Config, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return reader
}

// tokenFile returns the path of a file with the manager's token for the store.
func (e *Environment) tokenFile(t testing.TB) string {
	t.Helper()
	answer, err := e.Clients.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), "semmoe-manager", &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{Audiences: []string{artifact.Audience}, ExpirationSeconds: ptr.To[int64](3600)},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(path, []byte(answer.Status.Token), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
