// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// fieldManager is the field manager of every write.
const fieldManager = "kubectl-semmoe"

// Cluster gives commands access to one cluster.
type Cluster struct {
	client.Client
	// Namespace is the value of --namespace, or the namespace of the context.
	Namespace string
	// Metrics reads the metrics page of a pod through the API server's pod proxy.
	Metrics func(ctx context.Context, pod *corev1.Pod) ([]byte, error)
}

// connection holds the flags that select the cluster. They have the same names as kubectl's.
type connection struct {
	kubeconfig string
	overrides  clientcmd.ConfigOverrides
}

// bind registers the flags.
func (c *connection) bind(flags *pflag.FlagSet) {
	flags.StringVar(&c.kubeconfig, "kubeconfig", "", "path of the kubeconfig file (default: KUBECONFIG, then ~/.kube/config)")
	flags.StringVar(&c.overrides.CurrentContext, "context", "", "kubeconfig context to use")
	flags.StringVar(&c.overrides.Context.Cluster, "cluster", "", "kubeconfig cluster to use")
	flags.StringVar(&c.overrides.Context.AuthInfo, "user", "", "kubeconfig user to use")
	flags.StringVarP(&c.overrides.Context.Namespace, "namespace", "n", "", "namespace (default: namespace of the context)")
	flags.StringVar(&c.overrides.AuthInfo.Impersonate, "as", "", "user to impersonate")
	flags.StringVar(&c.overrides.Timeout, "request-timeout", "", "timeout of one request, for example 30s (default: no timeout)")
}

// newScheme returns a scheme with the kinds that commands read and write.
func newScheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, semmoev1.AddToScheme, leaderworkersetv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	return scheme, nil
}

// open connects to the cluster that the flags select.
func (c *connection) open() (*Cluster, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = c.kubeconfig
	loaded := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &c.overrides)
	config, err := loaded.ClientConfig()
	if err != nil {
		return nil, err
	}
	namespace, _, err := loaded.Namespace()
	if err != nil {
		return nil, err
	}
	// A user waits for the answer: the default client-side rate limit of client-go would delay it by seconds.
	config.QPS, config.Burst, config.UserAgent = 50, 100, fieldManager
	scheme, err := newScheme()
	if err != nil {
		return nil, err
	}
	objects, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return nil, err
	}
	core, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	return &Cluster{Client: objects, Namespace: namespace, Metrics: func(ctx context.Context, pod *corev1.Pod) ([]byte, error) {
		port, err := metricsPort(pod)
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(ctx, metricsTimeout)
		defer cancel()
		page, err := core.CoreV1().RESTClient().Get().Namespace(pod.Namespace).Resource("pods").Name(fmt.Sprintf("%s:%d", pod.Name, port)).
			SubResource("proxy").Suffix("metrics").Stream(ctx)
		if err != nil {
			return nil, err
		}
		defer page.Close()
		return io.ReadAll(io.LimitReader(page, maxMetricsBytes))
	}}, nil
}

// maxMetricsBytes limits the size of one metrics page. The page of a router with hundreds of ranks is many times
// smaller.
const maxMetricsBytes = 16 << 20

// metricsTimeout limits the metrics request to one pod, so that a pod that hangs does not block the output for the
// others.
const metricsTimeout = 10 * time.Second

// metricsPort returns the number of the pod's port named metrics. The API server's pod proxy does not accept port
// names.
func metricsPort(pod *corev1.Pod) (int32, error) {
	for _, container := range pod.Spec.Containers {
		for _, port := range container.Ports {
			if port.Name == "metrics" {
				return port.ContainerPort, nil
			}
		}
	}
	return 0, fmt.Errorf("pod %s has no port named metrics", pod.Name)
}
