// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	ctrlwebhook "sigs.k8s.io/controller-runtime/pkg/webhook"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers"
	"github.com/semmoe/operator/internal/observation/promquery"
	"github.com/semmoe/operator/test/apiserver"
	"github.com/semmoe/operator/test/ports"
	"github.com/semmoe/operator/test/tier"
)

const (
	patience = 30 * time.Second
	interval = 50 * time.Millisecond
)

var (
	restConfig *rest.Config
	scheme     *runtime.Scheme
	// api records warnings in warned.
	api     client.Client
	warned  warnings
	clients kubernetes.Interface
	secret  = types.NamespacedName{Namespace: "semmoe-system", Name: "semmoe-webhook-ca"}
	// port is the port of the webhook server, which runs until stopServing is called.
	port        int
	stopServing func()
)

// warnings records the warnings that the API server sent.
type warnings struct {
	mu   sync.Mutex
	list []string
}

func (w *warnings) HandleWarningHeaderWithContext(_ context.Context, _ int, _, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.list = append(w.list, text)
}

// take returns and clears the warnings.
func (w *warnings) take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	list := w.list
	w.list = nil
	return list
}

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	ctrl.SetLogger(logr.Discard())
	environment, err := apiserver.Start(&envtest.Environment{CRDDirectoryPaths: []string{filepath.Join("..", "config", "crd")}, ErrorIfCRDPathMissing: true})
	if err != nil {
		return tier.ExitCode(err)
	}
	defer environment.Stop() //nolint:errcheck // the processes end with this one
	restConfig = environment.Config
	if err := prepare(); err != nil {
		return tier.ExitCode(err)
	}
	defer func() { stopServing() }() // the current value of stopServing
	return m.Run()
}

// prepare installs the shipped configuration with the address of the test server, and starts the server.
func prepare() error {
	var err error
	if clients, err = kubernetes.NewForConfig(restConfig); err != nil {
		return err
	}
	if scheme, err = controllers.Scheme(); err != nil {
		return err
	}
	talking := rest.CopyConfig(restConfig)
	talking.WarningHandlerWithContext = &warned
	if api, err = client.New(talking, client.Options{Scheme: scheme}); err != nil {
		return err
	}
	ctx := context.Background()
	if err := api.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: secret.Namespace}}); err != nil {
		return err
	}
	if port, _, err = ports.Hold(); err != nil {
		return err
	}
	configuration, err := shipped(port)
	if err != nil {
		return err
	}
	if err := api.Create(ctx, configuration); err != nil {
		return err
	}
	stopServing, err = serveAt(port)
	return err
}

// serveAt runs a manager with the webhooks, and returns when it is ready and trusted.
func serveAt(port int) (func(), error) {
	certificates := NewCertificates(clients, secret, "semmoe", "127.0.0.1")
	certificates.period = interval
	manager, err := ctrl.NewManager(restConfig, ctrl.Options{
		Scheme:        scheme,
		Metrics:       metricsserver.Options{BindAddress: "0"},
		WebhookServer: ctrlwebhook.NewServer(ctrlwebhook.Options{Host: "127.0.0.1", Port: port, TLSOpts: []func(*tls.Config){certificates.TLS}}),
	})
	if err != nil {
		return nil, err
	}
	if err := errors.Join(manager.Add(certificates), Add(manager, promquery.Hosts{"prometheus.monitoring.svc"})); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- manager.Start(ctx) }()
	stop := func() { cancel(); <-ended }
	for deadline := time.Now().Add(patience); ; time.Sleep(interval) {
		if manager.GetWebhookServer().StartedChecker()(nil) == nil && asked(ctx) {
			return stop, nil
		}
		if time.Now().After(deadline) {
			stop()
			return nil, errors.New("the webhooks are not asked")
		}
	}
}

// asked reports whether the API server calls the webhooks. With failure policy Ignore it does not report failures.
func asked(ctx context.Context) bool {
	moed := deployment("asked")
	moed.Spec.Engine.Args = []string{"--ep-size=7"}
	return api.Create(ctx, moed, client.DryRunAll) != nil
}

// shipped returns the configuration in config/webhook, for a server on a local port.
func shipped(port int) (*admissionv1.ValidatingWebhookConfiguration, error) {
	file, err := os.Open(filepath.Join("..", "config", "webhook", "webhook.yaml"))
	if err != nil {
		return nil, err
	}
	defer file.Close()
	documents := yaml.NewYAMLOrJSONDecoder(file, 4096)
	for {
		configuration := &admissionv1.ValidatingWebhookConfiguration{}
		if err := documents.Decode(configuration); errors.Is(err, io.EOF) {
			return nil, errors.New("no ValidatingWebhookConfiguration in config/webhook/webhook.yaml")
		} else if err != nil {
			return nil, err
		}
		if configuration.Kind != "ValidatingWebhookConfiguration" {
			continue
		}
		for i := range configuration.Webhooks {
			at := &configuration.Webhooks[i].ClientConfig
			url := fmt.Sprintf("https://127.0.0.1:%d%s", port, *at.Service.Path)
			at.URL, at.Service = &url, nil
		}
		return configuration, nil
	}
}

// deployment returns a MoEDeployment without a plan. With a plan it is accepted without warnings.
func deployment(name string) *semmoev1.MoEDeployment {
	moed := &semmoev1.MoEDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	moed.Spec.Model.Volume = corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/srv/m"}}
	moed.Spec.Engine.Image, moed.Spec.Engine.Args = "engine:1", []string{"--moe-a2a-backend", "deepep"}
	moed.Spec.Parallelism.ExpertParallelSize = 4
	return moed
}

func create(t *testing.T, object client.Object) {
	t.Helper()
	if err := api.Create(t.Context(), object); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := api.Delete(context.Background(), object); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	})
}

// mentions reports whether one of the texts contains another one.
func mentions(texts []string, part string) bool {
	return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(text, part) })
}
