// SPDX-License-Identifier: Apache-2.0

package nodeless

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/semmoe/operator/internal/artifact/storetest"
	"github.com/semmoe/operator/test/localcluster"
	"github.com/semmoe/operator/test/processes"
)

// nodeName is the name of the Node object to which all pods are bound. Services do not include the addresses of unbound
// pods.
const nodeName = "nowhere"

// Cluster is a control plane without nodes.
type Cluster struct {
	*storetest.Environment
	dir               string
	controllerManager *processes.Process
}

// Start starts a control plane; Stop ends it. Start is slow: call it once, from TestMain.
func Start(ctx context.Context) (*Cluster, error) {
	environment, err := storetest.Start(ctx, func(server *envtest.APIServer) {
		// envtest disables the ServiceAccount admission plugin. Without the plugin pods get no tokens, which profiling
		// Jobs need.
		server.Configure().Disable("disable-admission-plugins").
			// The default range of envtest has addresses for only 254 Services.
			Set("service-cluster-ip-range", "10.96.0.0/16")
	})
	if err != nil {
		return nil, err
	}
	c := &Cluster{Environment: environment}
	if err := c.start(ctx); err != nil {
		return nil, errors.Join(err, c.Stop())
	}
	return c, nil
}

func (c *Cluster) start(ctx context.Context) error {
	if _, err := c.Clients.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}, metav1.CreateOptions{}); err != nil {
		return err
	}
	binaries, err := localcluster.FindBinaries()
	if err != nil {
		return err
	}
	if c.dir, err = os.MkdirTemp("", "nodeless-"); err != nil {
		return err
	}
	if err := writeKubeconfig(c.Kubeconfig(), c.Config); err != nil {
		return err
	}
	c.controllerManager, err = processes.Spawn(filepath.Join(c.dir, "kube-controller-manager.log"), nil,
		filepath.Join(binaries, "kube-controller-manager"),
		"--kubeconfig="+c.Kubeconfig(), "--leader-elect=false", "--secure-port=0",
		// No kubelet reports that the node is ready, so the controllers that evict pods are disabled.
		"--controllers=*,-node-lifecycle-controller,-taint-eviction-controller",
		// With the default of 20 requests/s the built-in controllers would be the bottleneck of the measurement.
		"--kube-api-qps=500", "--kube-api-burst=1000", "--concurrent-statefulset-syncs=10", "--concurrent-job-syncs=10")
	return err
}

// NewNamespace creates a namespace and waits until pods can be created in it.
func (c *Cluster) NewNamespace(ctx context.Context, name string) error {
	_, err := c.Clients.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	return wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		_, err := c.Clients.CoreV1().ServiceAccounts(name).Get(ctx, "default", metav1.GetOptions{})
		return err == nil, client.IgnoreNotFound(err)
	})
}

// Kubeconfig returns the path of an administrator's kubeconfig.
func (c *Cluster) Kubeconfig() string { return filepath.Join(c.dir, "kubeconfig") }

// ControllerManager returns the process of kube-controller-manager.
func (c *Cluster) ControllerManager() *processes.Process { return c.controllerManager }

// Stop ends the control plane.
func (c *Cluster) Stop() error {
	var err error
	if c.controllerManager != nil {
		err = c.controllerManager.Stop()
	}
	return errors.Join(err, c.Environment.Stop(), os.RemoveAll(c.dir))
}

func writeKubeconfig(path string, config *rest.Config) error {
	const name = "nodeless"
	if len(config.CertData) == 0 || len(config.KeyData) == 0 {
		return fmt.Errorf("failed to write %s: the administrator has no client certificate", path)
	}
	server, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return fmt.Errorf("failed to write %s: %w", path, err)
	}
	return clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{name: {Server: server.String(), CertificateAuthorityData: config.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{name: {ClientCertificateData: config.CertData, ClientKeyData: config.KeyData}},
		Contexts:       map[string]*clientcmdapi.Context{name: {Cluster: name, AuthInfo: name}},
		CurrentContext: name,
	}, path)
}
