{{/* Labels that select the pods of a component. Selectors of Deployments contain them and are immutable. */}}
{{- define "semmoe.labels" -}}
app.kubernetes.io/name: semmoe
app.kubernetes.io/component: {{ . }}
{{- end }}

{{/* Labels of an object: list of the root context, its component or "", and additional labels. */}}
{{- define "semmoe.objectLabels" -}}
{{- $root := index . 0 }}
{{- $labels := dict "app.kubernetes.io/name" "semmoe" "app.kubernetes.io/instance" $root.Release.Name "app.kubernetes.io/managed-by" $root.Release.Service }}
{{- $_ := set $labels "app.kubernetes.io/version" ($root.Chart.AppVersion | trunc 63) }}
{{- $_ := set $labels "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-") }}
{{- with index . 1 }}{{ $_ := set $labels "app.kubernetes.io/component" . }}{{ end }}
{{- $labels = mergeOverwrite (deepCopy $root.Values.commonLabels) $labels }}
{{- if gt (len .) 2 }}{{ $labels = mergeOverwrite $labels (index . 2) }}{{ end }}
{{- toYaml $labels }}
{{- end }}

{{/* With a digest, a tag is only included if the user set one. */}}
{{- define "semmoe.image" -}}
{{- $tag := .Values.image.tag }}
{{- if not .Values.image.digest }}{{ $tag = $tag | default .Chart.AppVersion }}{{ end }}
{{- .Values.image.repository }}{{ with $tag }}:{{ . }}{{ end }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{/* The base URL of the runbooks: monitoring.runbookURL, or the runbooks of the release. The package of a release has its tag instead of main. */}}
{{- define "semmoe.runbookURL" -}}
{{- .Values.monitoring.runbookURL | default "https://github.com/semmoe/operator/blob/main/docs/runbooks" | trimSuffix "/" }}
{{- end }}

{{/* Replaces the base URL of runbook links in a text by semmoe.runbookURL. */}}
{{- define "semmoe.runbooks" -}}
{{- .text | replace "https://github.com/semmoe/operator/blob/main/docs/runbooks" (include "semmoe.runbookURL" .root) }}
{{- end }}

{{/* The metadata of the pods of a component: user-provided labels, the labels of the selector, which take precedence, and annotations. */}}
{{- define "semmoe.podMetadata" -}}
labels: {{- mergeOverwrite (deepCopy .root.Values.commonLabels) .component.podLabels (include "semmoe.labels" .name | fromYaml) | toYaml | nindent 2 }}
{{- with .component.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Fields of the pods of a component in addition to their containers: pull Secrets and scheduling. */}}
{{- define "semmoe.pod" -}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 0 }}
{{- end }}
{{- with .component.priorityClassName }}
priorityClassName: {{ . | toYaml }}
{{- end }}
{{- with .component.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .component.tolerations }}
tolerations: {{- toYaml . | nindent 0 }}
{{- end }}
{{- with .component.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}

{{/* The security context of the pods of a component: the restricted pod security standard. The user is that of the
     image, or the one that OpenShift assigns to the namespace. With volume, a group owns the files of the volume, which
     OpenShift assigns too. */}}
{{- define "semmoe.podSecurity" -}}
{{- $context := dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault") }}
{{- if and .volume (not (.root.Capabilities.APIVersions.Has "security.openshift.io/v1")) }}
{{- $context = mergeOverwrite $context (dict "fsGroup" 65532 "fsGroupChangePolicy" "OnRootMismatch") }}
{{- end }}
{{- mergeOverwrite $context (deepCopy .component.podSecurityContext) | toYaml }}
{{- end }}

{{/* The security context of the operator's containers: the restricted pod security standard, and a read-only root file system. */}}
{{- define "semmoe.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Additional certificate authorities (caBundle): the environment variable, the mount, and the volume. */}}
{{- define "semmoe.authoritiesVariable" -}}
{{- if .Values.caBundle }}
- {name: SSL_CERT_DIR, value: /etc/semmoe/authorities}
{{- end }}
{{- end }}
{{- define "semmoe.authoritiesMount" -}}
{{- if .Values.caBundle }}
- {name: authorities, mountPath: /etc/semmoe/authorities, readOnly: true}
{{- end }}
{{- end }}
{{- define "semmoe.authoritiesVolume" -}}
{{- with .Values.caBundle }}
- name: authorities
  configMap:
    name: {{ . | toYaml }}
    items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- end }}

{{/* The roleRef and subjects of a binding: the role (kind and name), and the ServiceAccount. */}}
{{- define "semmoe.bound" -}}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ .kind }}
  name: {{ .role }}
subjects:
- kind: ServiceAccount
  name: {{ .account }}
  namespace: {{ .root.Release.Namespace | toYaml }}
{{- end }}

{{/* Not empty if the objects of the Prometheus operator are created. */}}
{{- define "semmoe.monitored" -}}
{{- $enabled := toString .Values.monitoring.enabled }}
{{- if or (eq $enabled "true") (and (eq $enabled "auto") (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) }}true{{ end }}
{{- end }}

{{/* The alerts with the settings of monitoring.alerts. */}}
{{- define "semmoe.alerts" -}}
{{- $settings := .Values.monitoring.alerts }}
{{- $names := dict }}
{{- $groups := list }}
{{- range $group := (.Files.Get "files/alerts.yaml" | fromYaml).groups }}
{{- $rules := list }}
{{- range $rule := $group.rules }}
{{- $_ := set $names $rule.alert true }}
{{- $own := get $settings $rule.alert | default dict }}
{{- if ne (toString (get $own "enabled")) "false" }}
{{- $_ := set $rule "labels" (mergeOverwrite $rule.labels (get $own "labels" | default dict)) }}
{{- with get $own "for" }}{{ $_ := set $rule "for" . }}{{ end }}
{{- $rules = append $rules $rule }}
{{- end }}
{{- end }}
{{- if $rules }}{{ $groups = append $groups (set $group "rules" $rules) }}{{ end }}
{{- end }}
{{- range $name, $_ := $settings }}
{{- if not (hasKey $names $name) }}
{{- fail (printf "monitoring.alerts.%s is not an alert of this chart: the alerts are %s" $name (keys $names | sortAlpha | join ", ")) }}
{{- end }}
{{- end }}
{{- dict "groups" $groups | toYaml }}
{{- end }}

{{/* The issuer of a certificate of cert-manager. */}}
{{- define "semmoe.issuerRef" -}}
{{- .Values.certManager.issuerRef | default (dict "name" "semmoe-self-signed" "kind" "Issuer") | toJson }}
{{- end }}

{{/* Binds a ClusterRole to a ServiceAccount in the watched namespaces, or in all namespaces if none is set. */}}
{{- define "semmoe.boundWhereWatched" -}}
{{- $binding := . }}
{{- range .root.Values.namespaces }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $binding.role }}
  namespace: {{ . | toYaml }}
  labels: {{- include "semmoe.objectLabels" (list $binding.root $binding.component) | nindent 4 }}
{{ include "semmoe.bound" $binding }}
{{- else }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ .role }}
  labels: {{- include "semmoe.objectLabels" (list .root .component) | nindent 4 }}
{{ include "semmoe.bound" . }}
{{- end }}
{{- end }}

{{/* Constraints between values that the schema cannot express. */}}
{{- define "semmoe.validate" -}}
{{- if and .Chart.IsRoot (hasKey .Values "enabled") (not .Values.enabled) }}
{{- fail "enabled: false is invalid: it is only allowed as the condition of a dependency in a parent chart; to remove this chart, uninstall it" }}
{{- end }}
{{- if not .Values.image.repository }}
{{- fail "image.repository is required: set it to the repository to which the image of the operator was pushed, for example --set image.repository=registry.example/semmoe" }}
{{- end }}
{{- if and .Values.certManager.issuerRef (not (or (and .Values.webhooks.enabled .Values.webhooks.certManager) .Values.monitoring.certManager)) }}
{{- fail "certManager.issuerRef has no effect, because no certificate of cert-manager is used: set webhooks.certManager or monitoring.certManager to true, or remove it" }}
{{- end }}
{{- if .Values.caBundle }}
{{- range .Values.store.env }}
{{- if eq .name "SSL_CERT_DIR" }}
{{- fail "store.env: SSL_CERT_DIR is invalid together with caBundle: set one of them" }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.store }}
{{- $volume := not (hasPrefix "s3://" .url) }}
{{- if and .enabled $volume (gt (int .replicas) 1) }}
{{- fail (printf "store.replicas: %d is invalid with store.url %s, because only one process may write to a volume: set store.replicas to 1, or store.url to s3://..." (int .replicas) .url) }}
{{- end }}
{{- end }}
{{- end }}

{{/* The permitted readers of metrics: namespaces with this label, as for request routers. */}}
{{- define "semmoe.monitoring" -}}
{namespaceSelector: {matchExpressions: [{key: semmoe.io/monitoring, operator: Exists}]}}
{{- end }}
