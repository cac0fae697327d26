// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

const (
	// hostsMount is the mount path of the directory with the hosts file in containers. /etc/hosts is a link into this
	// directory: a mounted file could not be replaced atomically, and a reader might find it empty.
	hostsMount = "/etc/localcluster"
	hostsFile  = "hosts"

	clusterDomain = "cluster.local"
)

// hostsFiles maintains one hosts file per namespace, because short Service names resolve only in the Service's
// namespace.
type hostsFiles struct {
	dir string

	mu    sync.Mutex
	names []hostName
	// written is the content of each hosts file in use, by namespace.
	written map[string][]byte
}

// hostName is the name of a Service, or of a pod behind a headless Service.
type hostName struct {
	address, host, namespace string
}

func newHostsFiles(dir string) *hostsFiles {
	return &hostsFiles{dir: dir, written: map[string][]byte{}}
}

// directory returns the directory of the namespace's hosts file, and creates both if they do not exist.
func (h *hostsFiles) directory(namespace string) (string, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	dir := filepath.Join(h.dir, namespace)
	if h.written[namespace] != nil {
		return dir, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	return dir, h.write(namespace)
}

// update writes the hosts files with changed content.
func (h *hostsFiles) update(services []*corev1.Service, slices []*discoveryv1.EndpointSlice) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.names = hostNames(services, slices)
	for namespace := range h.written {
		if err := h.write(namespace); err != nil {
			return err
		}
	}
	return nil
}

func (h *hostsFiles) write(namespace string) error {
	content := renderHosts(namespace, h.names)
	if bytes.Equal(content, h.written[namespace]) {
		return nil
	}
	path := filepath.Join(h.dir, namespace, hostsFile)
	if err := os.WriteFile(path+".new", content, 0o644); err != nil {
		return err
	}
	if err := os.Rename(path+".new", path); err != nil {
		return err
	}
	h.written[namespace] = content
	return nil
}

// hostNames returns the names of all Services and endpoints, sorted.
func hostNames(services []*corev1.Service, endpointSlices []*discoveryv1.EndpointSlice) []hostName {
	var names []hostName
	headless := map[string]bool{}
	for _, s := range services {
		switch s.Spec.ClusterIP {
		case "":
		case corev1.ClusterIPNone:
			headless[s.Namespace+"/"+s.Name] = true
		default:
			names = append(names, hostName{s.Spec.ClusterIP, s.Name, s.Namespace})
		}
	}
	for _, slice := range endpointSlices {
		service := slice.Labels[discoveryv1.LabelServiceName]
		if !headless[slice.Namespace+"/"+service] {
			continue
		}
		for _, e := range slice.Endpoints {
			if !ready(e) {
				continue
			}
			for _, address := range e.Addresses {
				names = append(names, hostName{address, service, slice.Namespace})
				if e.Hostname != nil {
					names = append(names, hostName{address, *e.Hostname + "." + service, slice.Namespace})
				}
			}
		}
	}
	slices.SortFunc(names, func(a, b hostName) int {
		return strings.Compare(a.namespace+"/"+a.host+"/"+a.address, b.namespace+"/"+b.host+"/"+b.address)
	})
	return slices.Compact(names)
}

// renderHosts returns the content of the hosts file for pods of the namespace.
func renderHosts(namespace string, names []hostName) []byte {
	var b bytes.Buffer
	b.WriteString("127.0.0.1 localhost\n::1 localhost\n")
	for _, n := range names {
		full := n.host + "." + n.namespace
		fmt.Fprintf(&b, "%s %s.svc.%s %s.svc %s", n.address, full, clusterDomain, full, full)
		if n.namespace == namespace {
			fmt.Fprintf(&b, " %s", n.host)
		}
		b.WriteByte('\n')
	}
	return b.Bytes()
}

// ready reports whether an endpoint accepts new connections. An unknown condition counts as ready.
func ready(e discoveryv1.Endpoint) bool {
	return e.Conditions.Ready == nil || *e.Conditions.Ready
}
