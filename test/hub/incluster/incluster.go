// SPDX-License-Identifier: Apache-2.0

// Package incluster runs the test double of the Hugging Face hub in a pod.
package incluster

import (
	"path/filepath"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/semmoe/operator/internal/kube/podsecurity"
	"github.com/semmoe/operator/test/localcluster"
	"github.com/semmoe/operator/test/programs"
)

// Image is the image of the hub: the program of Build as /hub.
const Image = "hub:dev"

// Name is the name of the pod and of its Service.
const Name = "hub"

// Build compiles the hub, and returns the path of the static binary.
func Build() (string, error) {
	root, err := localcluster.RepositoryRoot()
	if err != nil {
		return "", err
	}
	path := filepath.Join(root, "bin", "hub")
	_, err = programs.Run("go", []string{"CGO_ENABLED=0"}, "", "build", "-C", root, "-trimpath", "-ldflags", "-s -w", "-o", path, "./test/hub/cmd/hub")
	return path, err
}

// Endpoint returns the URL of the hub in a namespace.
func Endpoint(namespace string) string { return url(namespace, "8080") }

func url(namespace, port string) string { return "http://" + Name + "." + namespace + ".svc:" + port }

// Objects returns a pod of the hub, with additional flags, and its Service. The hub serves a directory of the pod's node
// as one repository.
func Objects(namespace, repository, directory string, flags ...string) (*corev1.Pod, *corev1.Service) {
	labels := map[string]string{"app": Name}
	// Pods of test/localcluster share the addresses of the machine: a port on all addresses would collide with managers.
	command := []string{"/hub", "--listen=$(POD_IP):8080", "--contents=$(POD_IP):8081", "--content-url=" + url(namespace, "8081")}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: Name, Labels: labels},
		Spec: corev1.PodSpec{
			SecurityContext: podsecurity.Pod(),
			Containers: []corev1.Container{{
				SecurityContext: podsecurity.Container(),
				Name:            "hub", Image: Image, ImagePullPolicy: corev1.PullNever,
				Env:            []corev1.EnvVar{{Name: "POD_IP", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "status.podIP"}}}},
				Command:        slices.Concat(command, flags, []string{repository + "=/srv/repository"}),
				ReadinessProbe: &corev1.Probe{PeriodSeconds: 1, ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/api/models/" + repository + "/revision/main", Port: intstr.FromInt32(8080)}}},
				VolumeMounts:   []corev1.VolumeMount{{Name: "repository", MountPath: "/srv/repository", ReadOnly: true}},
			}},
			Volumes: []corev1.Volume{{Name: "repository", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: directory}}}},
		},
	}
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: Name},
		Spec:       corev1.ServiceSpec{Selector: labels, Ports: []corev1.ServicePort{{Name: "hub", Port: 8080}, {Name: "contents", Port: 8081}}},
	}
	return pod, service
}
