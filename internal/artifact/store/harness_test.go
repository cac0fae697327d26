// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/keyutil"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/test/apiserver"
	"github.com/semmoe/operator/test/tier"
)

var (
	environment *apiserver.Server
	api         kubernetes.Interface // as administrator
)

func TestMain(m *testing.M) {
	log.SetLogger(logr.Discard()) // the watcher of certificate files needs a logger
	if text := os.Getenv(childVariable); text != "" {
		if err := runChild(text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if url := os.Getenv(bucketVariable); url != "" {
		fmt.Println("ready:", askBucket(url))
		return
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	var err error
	if environment, err = apiserver.Start(&envtest.Environment{}); err != nil {
		return tier.ExitCode(err)
	}
	defer environment.Stop() //nolint:errcheck // the processes end with this one
	if api, err = kubernetes.NewForConfig(environment.Config); err == nil {
		err = prepare(context.Background(), environment.Config)
	}
	if err != nil {
		return tier.ExitCode(err)
	}
	return m.Run()
}

// prepare creates the namespaces, their ServiceAccounts, and the permissions of the store from its manifests.
func prepare(ctx context.Context, config *rest.Config) error {
	for namespace, account := range map[string]string{"semmoe-system": "semmoe-manager", "team-a": "default", "team-b": "default"} {
		if _, err := api.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{}); err != nil {
			return err
		}
		if _, err := api.CoreV1().ServiceAccounts(namespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	objects, err := client.New(config, client.Options{})
	if err != nil {
		return err
	}
	manifest, err := os.Open(filepath.Join("..", "..", "..", "config", "store", "rbac.yaml"))
	if err != nil {
		return err
	}
	defer manifest.Close()
	documents := yaml.NewYAMLOrJSONDecoder(manifest, 4096)
	for {
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

// storeConfig returns the client configuration of the store's ServiceAccount.
func storeConfig(config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:semmoe-system:semmoe-store"}
	config.QPS, config.Burst = 100, 100
	return config
}

func testOptions(dir string) Options {
	return Options{
		URL:              "file://" + dir,
		BindAddress:      "127.0.0.1:0",
		MetricsAddress:   "127.0.0.1:0",
		Authority:        types.NamespacedName{Namespace: "semmoe-system", Name: "semmoe-store-ca"},
		TLSHosts:         []string{"127.0.0.1"},
		Manager:          types.NamespacedName{Namespace: "semmoe-system", Name: "semmoe-manager"},
		MaxArtifactBytes: 64 << 20,
		DrainTimeout:     20 * time.Second,
	}
}

// running is a running store.
type running struct {
	address, metrics string
	stop             context.CancelFunc
	ended            chan error
}

func start(t *testing.T, config *rest.Config, options Options) *running {
	t.Helper()
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	r := &running{stop: stop, ended: make(chan error, 1)}
	up := make(chan struct{})
	go func() {
		r.ended <- Run(ctx, clients, options, func(service, metrics net.Addr) {
			r.address, r.metrics = service.String(), metrics.String()
			close(up)
		})
	}()
	select {
	case <-up:
	case err := <-r.ended:
		stop()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stop()
		if err, ok := <-r.ended; ok && err != nil {
			t.Errorf("the store exited with %v", err)
		}
	})
	return r
}

func startDefault(t *testing.T, dir string) *running {
	t.Helper()
	return start(t, storeConfig(environment.Config), testOptions(dir))
}

// caFile writes the published certificate of the store to a file.
func caFile(t *testing.T) string {
	t.Helper()
	published, err := api.CoreV1().ConfigMaps("semmoe-system").Get(t.Context(), "semmoe-store-ca", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return writeFile(t, published.Data["ca.crt"])
}

func writeFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func clientFor(t *testing.T, address, token string) *access.Client {
	t.Helper()
	c, err := access.NewClient(access.Config{URL: "https://" + address, CAFile: caFile(t), TokenFile: writeFile(t, token)})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

var podNumber atomic.Int32

// createPod creates a pod with a unique name.
func createPod(t *testing.T, pod *corev1.Pod) *corev1.Pod {
	t.Helper()
	pod = pod.DeepCopy()
	pod.Name = fmt.Sprintf("%s-%d", pod.Name, podNumber.Add(1))
	pod.Spec = corev1.PodSpec{ServiceAccountName: "default", Containers: []corev1.Container{{Name: "c", Image: "i"}}}
	created, err := api.CoreV1().Pods(pod.Namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return created
}

// token requests a token from the API server. Without a pod the token is unbound.
func token(t *testing.T, namespace, account string, pod *corev1.Pod, audiences ...string) string {
	t.Helper()
	spec := authenticationv1.TokenRequestSpec{Audiences: audiences, ExpirationSeconds: ptr.To[int64](600)}
	if pod != nil {
		spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}
	}
	answer, err := api.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), account, &authenticationv1.TokenRequest{Spec: spec}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return answer.Status.Token
}

func podToken(t *testing.T, pod *corev1.Pod) string {
	t.Helper()
	return token(t, pod.Namespace, "default", createPod(t, pod), artifact.Audience)
}

func managerToken(t *testing.T) string {
	t.Helper()
	return token(t, "semmoe-system", "semmoe-manager", nil, artifact.Audience)
}

// resign changes the claims of a token and signs it with the key of the API server.
func resign(t *testing.T, token string, change func(claims map[string]any)) string {
	t.Helper()
	parts := strings.Split(token, ".")
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		t.Fatal(err)
	}
	claims := map[string]any{}
	if err := json.Unmarshal(payload, &claims); err != nil {
		t.Fatal(err)
	}
	change(claims)
	if payload, err = json.Marshal(claims); err != nil {
		t.Fatal(err)
	}
	key, err := keyutil.PrivateKeyFromFile(filepath.Join(environment.ControlPlane.APIServer.CertDir, "sa-signer.key"))
	if err != nil {
		t.Fatal(err)
	}
	signed := parts[0] + "." + base64.RawURLEncoding.EncodeToString(payload)
	sum := sha256.Sum256([]byte(signed))
	r, s, err := ecdsa.Sign(rand.Reader, key.(*ecdsa.PrivateKey), sum[:])
	if err != nil {
		t.Fatal(err)
	}
	signature := append(r.FillBytes(make([]byte, 32)), s.FillBytes(make([]byte, 32))...)
	return signed + "." + base64.RawURLEncoding.EncodeToString(signature)
}

// A child is a store in a separate process, which can be killed, or have a small disk.

const childVariable = "SEMMOE_TEST_STORE"

type childOptions struct {
	KubeConfig []byte
	Dir        string
	// DiskBytes is the size of a file system that is mounted on Dir in a separate mount namespace; 0 means none.
	DiskBytes int64
}

// runChild serves until standard input ends, and prints its address first.
func runChild(text string) error {
	var options childOptions
	if err := json.Unmarshal([]byte(text), &options); err != nil {
		return err
	}
	if options.DiskBytes > 0 {
		if err := unix.Mount("tmpfs", options.Dir, "tmpfs", 0, fmt.Sprintf("size=%d", options.DiskBytes)); err != nil {
			return fmt.Errorf("mount: %w", err)
		}
	}
	config, err := clientcmd.RESTConfigFromKubeConfig(options.KubeConfig)
	if err != nil {
		return err
	}
	clients, err := kubernetes.NewForConfig(storeConfig(config))
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.Background())
	go func() {
		io.Copy(io.Discard, os.Stdin) //nolint:errcheck // only the end of the input matters
		stop()
	}()
	return Run(ctx, clients, testOptions(options.Dir), func(service, _ net.Addr) { fmt.Println(service) })
}

type child struct {
	address string
	process *os.Process
}

func startChild(t *testing.T, options childOptions) *child {
	t.Helper()
	options.KubeConfig = environment.KubeConfig
	text, err := json.Marshal(options)
	if err != nil {
		t.Fatal(err)
	}
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), childVariable+"="+string(text))
	if options.DiskBytes > 0 {
		command.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		}
	}
	stdin, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	command.Stderr = &stderr
	if err := command.Start(); err != nil {
		if options.DiskBytes > 0 && (errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOSPC)) {
			t.Skipf("this machine does not allow the namespaces for a small disk: %v", err)
		}
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		command.Wait() //nolint:errcheck // the test may have killed it
	})
	line := make([]byte, 64)
	n, err := stdout.Read(line)
	if err != nil {
		stdin.Close()
		command.Wait() //nolint:errcheck // the output contains the error
		t.Fatalf("the child exited: %s", stderr.String())
	}
	return &child{address: strings.TrimSpace(string(line[:n])), process: command.Process}
}
