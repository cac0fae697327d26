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
	// hostsMount is where containers see the directory of their hosts file; /etc/hosts is a link into it. A file that
	// is mounted itself could not be replaced in one step, and a reader might find it empty.
	hostsMount = "/etc/localcluster"
	hostsFile  = "hosts"

	clusterDomain = "cluster.local"
)

// hostsFiles keeps one hosts file for each namespace: names are short within their own.
type hostsFiles struct {
	dir string

	mu    sync.Mutex
	names []hostName
	// written holds the content of each namespace that is in use.
	written map[string][]byte
}

// hostName is one name of the cluster: a Service, or a pod of a headless one.
type hostName struct {
	address, host, namespace string
}

func newHostsFiles(dir string) *hostsFiles {
	return &hostsFiles{dir: dir, written: map[string][]byte{}}
}

// directory returns the directory of the namespace's hosts file, which exists from then on.
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

// update writes the files that differ.
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

// hostNames derives the cluster's names, sorted.
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

// renderHosts writes the names as a pod of the namespace may use them.
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

// ready tells whether an endpoint takes new connections; unknown means yes.
func ready(e discoveryv1.Endpoint) bool {
	return e.Conditions.Ready == nil || *e.Conditions.Ready
}
