{{/* What the pods of our own processes have in common. Call with (list $ "component" .Values.component). */}}
{{- define "gristmill.podSpec" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := index . 2 -}}
serviceAccountName: {{ include "gristmill.component" $component }}
# A Service named gristmill-gateway would become GRISTMILL_GATEWAY_PORT=tcp://..., which is a setting of ours.
enableServiceLinks: false
{{- with $root.Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "gristmill.podSecurity" . | nindent 2 }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- if $values.topologySpreadConstraints }}
  {{- toYaml $values.topologySpreadConstraints | nindent 2 }}
{{- else }}
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "gristmill.selector" $component | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "gristmill.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10000
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "gristmill.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Labels and annotations of a pod. Call with (list $ "component" .Values.component). */}}
{{- define "gristmill.podMetadata" -}}
{{- $root := index . 0 -}}
{{- $values := index . 2 -}}
labels:
  {{- include "gristmill.labels" (list $root (index . 1)) | nindent 2 }}
  {{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  kubectl.kubernetes.io/default-container: {{ index . 1 }}
  {{- with $values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Proxy, certificates and the user's own variables. Call with (list $ .Values.component). */}}
{{- define "gristmill.commonEnv" -}}
{{- $root := index . 0 -}}
{{- $values := index . 1 -}}
{{- $proxy := $root.Values.proxy -}}
- name: HOME
  value: /tmp
{{- if $proxy.http }}
- name: HTTP_PROXY
  value: {{ $proxy.http | quote }}
{{- end }}
{{- if $proxy.https }}
- name: HTTPS_PROXY
  value: {{ $proxy.https | quote }}
{{- end }}
{{- if or $proxy.http $proxy.https $proxy.none }}
- name: NO_PROXY
  value: {{ include "gristmill.noProxy" $root | quote }}
{{- end }}
{{- if or $root.Values.ca.existingConfigMap $root.Values.ca.existingSecret }}
- name: SSL_CERT_FILE
  value: /etc/gristmill/ca/{{ $root.Values.ca.key }}
{{- end }}
{{- with $values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "gristmill.noProxy" -}}
{{- $own := "localhost,127.0.0.1,.svc,.cluster.local,kubernetes.default,$(KUBERNETES_SERVICE_HOST)" -}}
{{- if .Values.proxy.none }}{{ printf "%s,%s" $own .Values.proxy.none }}{{ else }}{{ $own }}{{ end -}}
{{- end }}

{{- define "gristmill.commonVolumeMounts" -}}
{{- $root := index . 0 -}}
- name: tmp
  mountPath: /tmp
{{- if or $root.Values.ca.existingConfigMap $root.Values.ca.existingSecret }}
- name: ca
  mountPath: /etc/gristmill/ca
  readOnly: true
{{- end }}
{{- with (index . 1).extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "gristmill.commonVolumes" -}}
{{- $root := index . 0 -}}
- name: tmp
  emptyDir:
    sizeLimit: 256Mi
{{- if $root.Values.ca.existingConfigMap }}
- name: ca
  configMap:
    name: {{ $root.Values.ca.existingConfigMap }}
{{- else if $root.Values.ca.existingSecret }}
- name: ca
  secret:
    secretName: {{ $root.Values.ca.existingSecret }}
{{- end }}
{{- with (index . 1).extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Pods wait until the Secret is there: the operator makes it at its first start. */}}
{{- define "gristmill.clusterKeyVolume" -}}
- name: cluster-key
  secret:
    secretName: {{ include "gristmill.clusterKeySecret" . }}
    items:
      - key: cluster.key
        path: cluster.key
{{- end }}

{{- define "gristmill.clusterKeyMount" -}}
- name: cluster-key
  mountPath: /etc/gristmill/cluster-key
  readOnly: true
{{- end }}

{{/* Start-up, liveness and readiness over HTTP. Call with the port's name. */}}
{{- define "gristmill.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: {{ . }}}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /healthz, port: {{ . }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: {{ . }}}
  periodSeconds: 3
  timeoutSeconds: 3
  failureThreshold: 2
{{- end }}

{{/* Call with (list $ "component" .Values.component). */}}
{{- define "gristmill.serviceAccount" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "gristmill.component" $component }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "gristmill.labels" (list $root $component) | nindent 4 }}
  {{- with (index . 2).serviceAccountAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}

{{/* One pod may be away at a time. Call with (list $ "component" .Values.component). */}}
{{- define "gristmill.pdb" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := index . 2 -}}
{{- if and $values.pdb.enabled (gt (int $values.replicas) 1) }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "gristmill.component" $component }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "gristmill.labels" (list $root $component) | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "gristmill.selector" $component | nindent 6 }}
{{- end }}
{{- end }}
