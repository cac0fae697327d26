// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/managerauth"
)

// eachReport calls f with the observations of every live request router. Like a manager, it reads them with a client
// certificate.
func (d *demo) eachReport(ctx context.Context, f func(lar.Report) error) error {
	pods, err := d.podsOf(ctx, "router")
	if err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", d.cluster.kubeconfig)
	if err != nil {
		return err
	}
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	identity, err := managerauth.Load(ctx, clients, types.NamespacedName{Namespace: systemNamespace, Name: managerauth.SecretName})
	if err != nil {
		return err
	}
	defer identity.HTTP.CloseIdleConnections()
	for _, pod := range pods {
		report, err := d.reportOf(ctx, identity.HTTP, pod)
		if err == nil {
			err = f(report)
		}
		if err != nil {
			return fmt.Errorf("pod %s: %w", pod, err)
		}
	}
	return nil
}

func (d *demo) reportOf(ctx context.Context, client *http.Client, pod string) (report lar.Report, err error) {
	address, err := d.cluster.reachPod(ctx, client.Transport.(*http.Transport), pod, managerauth.Port)
	if err != nil {
		return report, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+address+"/v1/observations", nil)
	if err != nil {
		return report, err
	}
	response, err := client.Do(request)
	if err != nil {
		return report, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return report, fmt.Errorf("observations: %s", response.Status)
	}
	return report, json.NewDecoder(response.Body).Decode(&report)
}

// reachPod returns an address at which the transport reaches a port of a pod. Request routers listen only on the pod
// address, which kubectl port-forward does not reach. With an existing cluster, this machine must reach pod addresses
// directly, as a node does.
func (c *cluster) reachPod(ctx context.Context, transport *http.Transport, pod string, port int) (address string, err error) {
	if c.local != nil {
		proxy, err := c.local.PodProxy(ctx)
		if err != nil {
			return "", err
		}
		transport.Proxy = http.ProxyURL(proxy)
	}
	ip, err := c.run(ctx, nil, "get", "pod", "-n", namespace, pod, "-o", "jsonpath={.status.podIP}")
	return net.JoinHostPort(ip, fmt.Sprint(port)), err
}
