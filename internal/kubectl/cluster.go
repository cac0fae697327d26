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

// fieldManager is the name under which everything is written.
const fieldManager = "kubectl-semmoe"

// Cluster is what commands work on.
type Cluster struct {
	client.Client
	// Namespace is that of the flag, or of the context.
	Namespace string
	// Metrics reads the metrics of a pod, through the API server.
	Metrics func(ctx context.Context, pod *corev1.Pod) ([]byte, error)
}

// connection are the flags that say which cluster is meant, as kubectl has them.
type connection struct {
	kubeconfig string
	overrides  clientcmd.ConfigOverrides
}

// bind adds the flags.
func (c *connection) bind(flags *pflag.FlagSet) {
	flags.StringVar(&c.kubeconfig, "kubeconfig", "", "file with the clusters (default: KUBECONFIG, else ~/.kube/config)")
	flags.StringVar(&c.overrides.CurrentContext, "context", "", "context of that file")
	flags.StringVar(&c.overrides.Context.Cluster, "cluster", "", "cluster of that file")
	flags.StringVar(&c.overrides.Context.AuthInfo, "user", "", "user of that file")
	flags.StringVarP(&c.overrides.Context.Namespace, "namespace", "n", "", "namespace (default: that of the context)")
	flags.StringVar(&c.overrides.AuthInfo.Impersonate, "as", "", "user to act as")
	flags.StringVar(&c.overrides.Timeout, "request-timeout", "", "how long a request may take, such as 30s (default: no limit)")
}

// newScheme has the kinds that commands read and write.
func newScheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, semmoev1.AddToScheme, leaderworkersetv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	return scheme, nil
}

// open connects to the cluster that the flags mean.
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
	// A person waits: what client-go holds back for the good of others would be seconds.
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

// maxMetricsBytes bounds what is read of a pod's metrics: many times the page of a router with hundreds of ranks.
const maxMetricsBytes = 16 << 20

// metricsTimeout bounds how long one pod may take to answer, so that one that hangs does not hide the others.
const metricsTimeout = 10 * time.Second

// metricsPort is the number of a pod's port "metrics": the API server's proxy takes no names of pods' ports.
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
