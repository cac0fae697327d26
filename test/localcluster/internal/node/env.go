// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// defaultPath is the PATH that container runtimes set if the image defines none.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// podContext contains the values that the downward API exposes.
type podContext struct {
	pod         *corev1.Pod
	podIP       string
	hostIP      string
	allocatable corev1.ResourceList
}

// environment returns the container's variables as a list of KEY=VALUE and as a map for expansion.
func environment(ctx context.Context, client kubernetes.Interface, p podContext, c *corev1.Container) ([]string, map[string]string, error) {
	values := map[string]string{
		"PATH":                    defaultPath,
		"HOSTNAME":                hostname(p.pod),
		"KUBERNETES_SERVICE_HOST": kubernetesServiceHost, "KUBERNETES_SERVICE_PORT": kubernetesServicePort,
		"KUBERNETES_SERVICE_PORT_HTTPS": kubernetesServicePort,
	}
	for _, from := range c.EnvFrom {
		data, err := envFromData(ctx, client, p.pod.Namespace, from)
		if err != nil {
			return nil, nil, err
		}
		for key, value := range data {
			values[from.Prefix+key] = value
		}
	}
	for _, e := range c.Env {
		value, ok, err := envValue(ctx, client, p, c, e, values)
		if err != nil {
			return nil, nil, fmt.Errorf("env %s: %w", e.Name, err)
		}
		if ok {
			values[e.Name] = value
		}
	}
	var list []string
	for _, name := range slices.Sorted(maps.Keys(values)) {
		list = append(list, name+"="+values[name])
	}
	return list, values, nil
}

// envFromData reads all keys of a ConfigMap or Secret. It returns no keys if the source is optional and does not exist.
func envFromData(ctx context.Context, client kubernetes.Interface, namespace string, from corev1.EnvFromSource) (map[string]string, error) {
	switch {
	case from.ConfigMapRef != nil:
		data, err := configMapData(ctx, client, namespace, from.ConfigMapRef.Name, isTrue(from.ConfigMapRef.Optional))
		return toStrings(data), err
	case from.SecretRef != nil:
		data, err := secretData(ctx, client, namespace, from.SecretRef.Name, isTrue(from.SecretRef.Optional))
		return toStrings(data), err
	}
	return nil, nil
}

// envValue resolves one variable. It returns false if the source of the variable is optional and does not exist.
func envValue(ctx context.Context, client kubernetes.Interface, p podContext, c *corev1.Container, e corev1.EnvVar, known map[string]string) (string, bool, error) {
	if e.ValueFrom == nil {
		return expand(e.Value, known), true, nil
	}
	switch from := e.ValueFrom; {
	case from.FieldRef != nil:
		value, err := fieldValue(p, from.FieldRef.FieldPath)
		return value, true, err
	case from.ResourceFieldRef != nil:
		value, err := resourceValue(p, c, from.ResourceFieldRef)
		return value, true, err
	case from.ConfigMapKeyRef != nil:
		ref := from.ConfigMapKeyRef
		data, err := configMapData(ctx, client, p.pod.Namespace, ref.Name, isTrue(ref.Optional))
		return keyOf("configmap", ref.Name, data, ref.Key, isTrue(ref.Optional), err)
	case from.SecretKeyRef != nil:
		ref := from.SecretKeyRef
		data, err := secretData(ctx, client, p.pod.Namespace, ref.Name, isTrue(ref.Optional))
		return keyOf("secret", ref.Name, data, ref.Key, isTrue(ref.Optional), err)
	}
	return "", false, fmt.Errorf("this source is not supported by the local node")
}

func keyOf(kind, name string, data map[string][]byte, key string, optional bool, err error) (string, bool, error) {
	if err != nil {
		return "", false, err
	}
	value, ok := data[key]
	if !ok && !optional {
		return "", false, fmt.Errorf("couldn't find key %s in %s %s", key, kind, name)
	}
	return string(value), ok, nil
}

// configMapData returns all keys of a ConfigMap, or nil if the ConfigMap is optional and does not exist.
func configMapData(ctx context.Context, client kubernetes.Interface, namespace, name string, optional bool) (map[string][]byte, error) {
	m, err := client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) && optional {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	data := maps.Clone(m.BinaryData)
	if data == nil {
		data = map[string][]byte{}
	}
	for key, value := range m.Data {
		data[key] = []byte(value)
	}
	return data, nil
}

// secretData returns all keys of a Secret, or nil if the Secret is optional and does not exist.
func secretData(ctx context.Context, client kubernetes.Interface, namespace, name string, optional bool) (map[string][]byte, error) {
	s, err := client.CoreV1().Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) && optional {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return s.Data, nil
}

func toStrings(data map[string][]byte) map[string]string {
	result := make(map[string]string, len(data))
	for key, value := range data {
		result[key] = string(value)
	}
	return result
}

func isTrue(b *bool) bool { return b != nil && *b }

// fieldValue returns a field of the pod for a field path of the downward API.
func fieldValue(p podContext, path string) (string, error) {
	m := p.pod.ObjectMeta
	if rest, ok := strings.CutPrefix(path, "metadata.labels['"); ok {
		return m.Labels[strings.TrimSuffix(rest, "']")], nil
	}
	if rest, ok := strings.CutPrefix(path, "metadata.annotations['"); ok {
		return m.Annotations[strings.TrimSuffix(rest, "']")], nil
	}
	switch path {
	case "metadata.name":
		return m.Name, nil
	case "metadata.namespace":
		return m.Namespace, nil
	case "metadata.uid":
		return string(m.UID), nil
	case "metadata.labels":
		return formatMap(m.Labels), nil
	case "metadata.annotations":
		return formatMap(m.Annotations), nil
	case "spec.nodeName":
		return p.pod.Spec.NodeName, nil
	case "spec.serviceAccountName":
		return p.pod.Spec.ServiceAccountName, nil
	case "status.podIP", "status.podIPs":
		return p.podIP, nil
	case "status.hostIP", "status.hostIPs":
		return p.hostIP, nil
	}
	return "", fmt.Errorf("field %s is not supported by the local node", path)
}

// formatMap formats a map like the downward API: one key="value" per line, sorted by key.
func formatMap(m map[string]string) string {
	var lines []string
	for _, key := range slices.Sorted(maps.Keys(m)) {
		lines = append(lines, key+"="+strconv.Quote(m[key]))
	}
	return strings.Join(lines, "\n")
}

// resourceValue returns a request or limit of a container in units of the divisor, rounded up. For a limit that is not
// set it returns the allocatable amount of the node.
func resourceValue(p podContext, c *corev1.Container, ref *corev1.ResourceFieldSelector) (string, error) {
	if c == nil || ref.ContainerName != "" && ref.ContainerName != c.Name {
		c = findContainer(p.pod, ref.ContainerName)
		if c == nil {
			return "", fmt.Errorf("container %s not found", ref.ContainerName)
		}
	}
	kind, name, ok := strings.Cut(ref.Resource, ".")
	if !ok {
		return "", fmt.Errorf("resource %s is not supported", ref.Resource)
	}
	var quantity resource.Quantity
	switch kind {
	case "limits":
		if quantity, ok = c.Resources.Limits[corev1.ResourceName(name)]; !ok {
			quantity = p.allocatable[corev1.ResourceName(name)]
		}
	case "requests":
		quantity = c.Resources.Requests[corev1.ResourceName(name)]
	default:
		return "", fmt.Errorf("resource %s is not supported", ref.Resource)
	}
	value, divisor := quantity.Value(), ref.Divisor.Value()
	if name == string(corev1.ResourceCPU) {
		value, divisor = quantity.MilliValue(), ref.Divisor.MilliValue()
		if divisor == 0 {
			divisor = 1000
		}
	}
	divisor = max(divisor, 1)
	return strconv.FormatInt((value+divisor-1)/divisor, 10), nil
}

func findContainer(pod *corev1.Pod, name string) *corev1.Container {
	for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			if list[i].Name == name {
				return &list[i]
			}
		}
	}
	return nil
}

// expand replaces $(NAME) with the value of a known variable. References to unknown variables stay unchanged, and $$ is
// a literal $.
func expand(s string, values map[string]string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '$' || i+1 == len(s) {
			b.WriteByte(s[i])
			continue
		}
		switch s[i+1] {
		case '$':
			b.WriteByte('$')
			i++
		case '(':
			end := strings.IndexByte(s[i:], ')')
			if end < 0 {
				b.WriteString(s[i:])
				return b.String()
			}
			if value, ok := values[s[i+2:i+end]]; ok {
				b.WriteString(value)
			} else {
				b.WriteString(s[i : i+end+1])
			}
			i += end
		default:
			b.WriteByte('$')
		}
	}
	return b.String()
}

func expandAll(list []string, values map[string]string) []string {
	var result []string
	for _, s := range list {
		result = append(result, expand(s, values))
	}
	return result
}

// hostname returns the pod's host name, truncated to 63 bytes.
func hostname(pod *corev1.Pod) string {
	name := pod.Name
	if pod.Spec.Hostname != "" {
		name = pod.Spec.Hostname
	}
	if len(name) > 63 {
		name = strings.TrimRight(name[:63], "-.")
	}
	return name
}
